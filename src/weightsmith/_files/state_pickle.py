"""The pickle of a PyTorch state dict, read as data: nothing is imported, nothing is called.

A pickle is a program for a machine with a stack and a memo. This machine knows the instructions that state dicts need, and
instead of the objects it makes records of its own: a tensor is a storage's key, an offset, sizes and strides. A function
or class is a name. Names that are not in a short list are refused before anything is done with them.

Bounds: the pickle's size, the number of instructions and of values that are made, the height of the stack. Time and memory
are linear in the size: there is no recursion, and no value of the pickle is ever hashed, compared or printed as a whole,
because shared parts make small pickles of values that are exponentially large (and tuples in themselves).
"""

from __future__ import annotations

import io
import pickletools
import re
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

from weightsmith._base.errors import FormatError, Unsupported
from weightsmith._base.files import DAMAGED, show

MAX_PICKLE_BYTES = 64 << 20  # a tensor of a state dict takes about 150 bytes
MAX_VALUES = 2_000_000  # a tensor takes about 20: 80,000 tensors; about 250 MB if a hostile file makes so many
MAX_STEPS = 4_000_000  # instructions, a tensor takes about 50; about 3 s
MAX_STACK = 1_000_000

CONVERT = (
    "If you trust the file, load it with torch in an isolated environment, and save the model with "
    "save_pretrained(safe_serialization=True)."
)


@dataclass(slots=True, eq=False)
class Global:
    """The name of a function or class, `torch.FloatStorage`. Never looked up."""

    name: str


@dataclass(slots=True, eq=False)
class Storage:
    """A storage: name of its class, key of its record, number of elements of that class."""

    kind: str
    key: str
    elements: int


@dataclass(slots=True, eq=False)
class Tensor:
    """A tensor, as the pickle says: nothing of it is checked.

    storage  what it is a view of
    first    offset of its first element in the storage
    shape    and strides, in elements
    strides
    dtype    `float8_e4m3fn`, or None when the storage's class says it
    bits     `conj` or `neg` set: its values are not those in the storage
    """

    storage: Storage
    first: Any
    shape: Any
    strides: Any
    dtype: str | None
    bits: bool


@dataclass(slots=True, eq=False)
class Mapping:
    """A dict or OrderedDict: keys and values in turn, as they were set."""

    flat: list[Any] = field(default_factory=list)

    def items(self) -> Iterator[tuple[Any, Any]]:
        """(key, value), in order; a key may come twice."""
        return zip(self.flat[::2], self.flat[1::2], strict=True)


@dataclass(slots=True, eq=False)
class Instance:
    """An object of a class that the caller named: never made, only what the pickle says of it.

    kind   the full name of its class
    args   of its construction
    state  that is set afterwards; None: none
    """

    kind: str
    args: tuple[Any, ...]
    state: Any = None

    def attribute(self, name: str) -> Any:
        """The value of an attribute; None if there is none."""
        items = self.state.items() if type(self.state) is Mapping else ()
        return next((value for key, value in items if type(key) is str and key == name), None)


@dataclass(slots=True, eq=False)
class Opaque:
    """A value that no tensor is made of, by its kind: `set`, `bytes`."""

    kind: str


STORAGES = {
    "torch.DoubleStorage": "float64",
    "torch.FloatStorage": "float32",
    "torch.HalfStorage": "float16",
    "torch.BFloat16Storage": "bfloat16",
    "torch.LongStorage": "int64",
    "torch.IntStorage": "int32",
    "torch.ShortStorage": "int16",
    "torch.CharStorage": "int8",
    "torch.ByteStorage": "uint8",
    "torch.BoolStorage": "bool",
    "torch.UntypedStorage": "uint8",
    "torch.storage.UntypedStorage": "uint8",
    "torch.ComplexDoubleStorage": "complex128",
    "torch.ComplexFloatStorage": "complex64",
    "torch.QInt8Storage": "qint8",
    "torch.QInt32Storage": "qint32",
    "torch.QUInt8Storage": "quint8",
    "torch.QUInt4x2Storage": "quint4x2",
    "torch.QUInt2x4Storage": "quint2x4",
}
"""The storage classes, and the torch dtype of their elements."""

_DTYPE = re.compile(
    r"torch\.(float(8_\w+|4_\w+|16|32|64)|bfloat16|u?int\d\d?|bool|complex(32|64|128)|q?u?int(8|32|4x2|2x4)|bits\w+)", re.ASCII
)
_IDENTIFIERS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
_OPAQUE = {
    "torch.device": "device",
    "torch.serialization._get_layout": "layout",
    "builtins.set": "set",
    "builtins.frozenset": "set",
    "builtins.bytearray": "bytes",
    "builtins.complex": "complex",
    "_codecs.encode": "bytes",
    "collections.Counter": "Counter",
}
_MEMBER = "builtins.getattr"
"""Python 3.11.0 to 3.11.3 pickle the member of an enum as this of its class and name; others, as a call of the class."""
_CLASSES = ("torch.Tensor", "torch.nn.parameter.Parameter")
_REASONS = (
    ("torch._utils._rebuild_sparse", "It holds a sparse tensor."),
    ("torch._utils._rebuild_qtensor", "It holds a tensor that PyTorch has quantised."),
    ("torch._utils._rebuild_meta", "It holds a tensor on the meta device, which has no values."),
    ("torch._utils._rebuild_wrapper", "It holds a tensor subclass."),
    ("torch._utils._rebuild_nested", "It holds a nested tensor."),
    ("torch.nested", "It holds a nested tensor."),
    ("torch.distributed", "It holds tensors of a distributed run (DTensor, FSDP)."),
    ("torch.nn.modules", "It holds a whole module, not a state dict."),
    ("torchao.", "It holds a tensor subclass."),
    ("numpy.", "It holds numpy values, which are usually part of the training state."),
)


def interpret(data: bytes, classes: Container[str] = ()) -> Any:
    """What a pickle holds, as records of this module, tuples, lists, str, int, float, bool and None.

    data     the pickle, protocols 2 to 5, of at most `MAX_PICKLE_BYTES`: the caller sees to it
    classes  whose objects may be in it besides, as an `Instance` each

    Raises FormatError for bytes that are no pickle, or no pickle that PyTorch writes; Unsupported for a function or class
    that state dicts do not need, and for more than this machine takes. The errors do not name the file. Cost: about 0.2 s
    for 10,000 tensors.

    >>> import pickle
    >>> interpret(pickle.dumps({"a": (1, None)}, protocol=2)).flat
    ['a', (1, None)]
    """
    return _Machine(data, classes).run()


def describe(value: Any) -> str:
    """The kind of a value in a few words. The value itself may be too large to print.

    >>> describe((1, 2)), describe(3), describe(Mapping())
    ('a tuple', '3', 'a dict')
    """
    match value:
        case None | bool() | int() | float() | str():
            return show(value)
        case Global(name):
            return show(name)
        case Opaque(kind):
            return f"a {kind}"
        case Instance(kind):
            return f"an object of {show(kind)}"
        case Mapping():
            return "a dict"
        case _:
            return f"a {type(value).__name__.lower()}"


class _Machine:
    def __init__(self, data: bytes, classes: Container[str]) -> None:
        self.data = data
        self.classes = classes
        self.file = io.BytesIO(data)
        self.position = 0  # of the instruction
        self.stack: list[Any] = []
        self.marks: list[int] = []  # heights of the stack
        self.memo: list[Any] = []
        self.spent_values = 0
        self.globals: dict[str, Global] = {}

    def run(self) -> Any:
        if not self.data.startswith(b"\x80"):
            self.reject(f"starts with {show(self.data[:4])}, not with its protocol")
        for _ in range(MAX_STEPS):
            if not self.step():
                break
        else:
            self.too_much(f"has more than {MAX_STEPS:,} instructions")
        if len(self.stack) != 1 or self.marks:
            self.reject(f"ends with {len(self.stack)} values on its stack and {len(self.marks)} open marks, not with one value")
        if n_following := self.remaining():
            self.reject(f"ends there, and {n_following:,} bytes follow")
        return self.stack[0]

    def step(self) -> bool:
        """Do the next instruction. False: it was the last."""
        self.position = self.file.tell()
        code = self.file.read(1)
        opcode = _OPCODES.get(code)
        if opcode is None:
            self.reject(f"0x{code.hex()} is no instruction of a pickle" if code else "ends early, without its last instruction")
        if opcode.name == "STOP":
            return False
        operation = _OPERATIONS.get(opcode.name)
        if operation is None or (opcode.name == "NEWOBJ" and self.classes == ()):
            what = f"the pickle, byte {self.position:,}: a state dict needs no instruction {opcode.name}; it was not run"
            raise Unsupported(what, fix=CONVERT)
        try:
            argument = opcode.arg.reader(self.file) if opcode.arg and opcode.name != "GLOBAL" else None
            if type(argument) is str:
                argument.encode()  # pickletools lets lone surrogates pass
        except UnicodeError:
            self.reject("a string is not UTF-8")
        except ValueError as error:
            self.reject(f"ends early: {error}")
        operation(self, argument)
        return True

    # Errors and bounds

    def reject(self, problem: str) -> NoReturn:
        raise FormatError(f"the pickle, byte {self.position:,}: {problem}", fix=DAMAGED)

    def too_much(self, problem: str) -> NoReturn:
        raise Unsupported(f"the pickle {problem}", fix=f"{CONVERT} It may be an attack.")

    def remaining(self) -> int:
        return len(self.data) - self.file.tell()

    def spend(self) -> None:
        self.spent_values += 1
        if self.spent_values > MAX_VALUES:
            self.too_much(f"makes more than {MAX_VALUES:,} values")

    # The stack

    def push(self, value: Any) -> None:
        if len(self.stack) >= MAX_STACK:
            self.too_much(f"has more than {MAX_STACK:,} values on its stack")
        self.stack.append(value)

    def make(self, value: Any) -> None:
        self.spend()
        self.push(value)

    def top(self) -> Any:
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            self.reject("takes a value from an empty stack")
        return self.stack[-1]

    def pop(self) -> Any:
        value = self.top()
        del self.stack[-1]
        return value

    def pop_mark(self) -> list[Any]:
        if not self.marks:
            self.reject("goes back to a mark that was not set")
        height = self.marks.pop()
        values = self.stack[height:]
        del self.stack[height:]
        return values

    # Instructions

    def protocol(self, version: int) -> None:
        if not 2 <= version <= 5:
            self.reject(f"has protocol {version}; 2 to 5 are read")

    def frame(self, nbytes: int) -> None:
        if nbytes > self.remaining():
            self.reject(f"has a frame of {nbytes:,} bytes, {self.remaining():,} follow")

    def mark(self) -> None:
        if len(self.marks) >= MAX_STACK:
            self.reject(f"sets more than {MAX_STACK:,} marks")
        self.marks.append(len(self.stack))

    def tuple_of(self, n: int) -> None:
        values = [self.pop() for _ in range(n)]
        self.make(tuple(reversed(values)))

    def set_items(self, pairs: list[Any]) -> None:
        target = self.top()
        if type(target) is not Mapping:
            self.reject(f"sets items of {describe(target)}, which is not a dict")
        if len(pairs) % 2:
            self.reject(f"sets the items of a dict, and has an odd number of keys and values ({len(pairs):,})")
        target.flat += pairs

    def append(self, values: list[Any]) -> None:
        target = self.top()
        if type(target) is not list:
            self.reject(f"appends to {describe(target)}, which is not a list")
        target += values

    def add_to_set(self) -> None:
        self.pop_mark()
        target = self.top()
        if type(target) is not Opaque:
            self.reject(f"adds to {describe(target)}, which is not a set")

    def frozen_set(self) -> None:
        self.pop_mark()
        self.make(Opaque("set"))

    def put(self, index: int) -> None:
        value = self.top()
        if index > len(self.memo):
            self.reject(f"stores memo {index:,} before memo {len(self.memo):,}")
        if index < len(self.memo):
            self.memo[index] = value
        else:
            self.spend()
            self.memo.append(value)

    def get(self, index: int) -> None:
        if index >= len(self.memo):
            self.reject(f"takes memo {index:,}, and {len(self.memo):,} were stored")
        self.push(self.memo[index])

    def read_global(self) -> None:
        """Two lines. pickletools would undo escapes in them, and read lines of any length."""
        module, name = (self.file.readline(513).decode("utf-8", "replace") for _ in range(2))
        if not (module.endswith("\n") and name.endswith("\n")):
            self.reject("the name of a function or class does not end within 512 bytes")
        self.find_global(module[:-1], name[:-1])

    def stack_global(self) -> None:
        name, module = self.pop(), self.pop()
        if type(name) is not str or type(module) is not str:
            self.reject(f"the name of a function or class is not two strings but {describe(module)} and {describe(name)}")
        self.find_global(module, name)

    def find_global(self, module: str, name: str) -> None:
        """Push the name if it is one of those that state dicts need."""
        full = f"{'builtins' if module == '__builtin__' else module}.{name}"
        value = self.globals.get(full)
        if value is None:
            if not (_IDENTIFIERS.fullmatch(module) and _IDENTIFIERS.fullmatch(name)):
                self.reject(f"{show(module)} and {show(name)} are no names of a module and of a function or class")
            known = full in _CALLS or full in STORAGES or full in _OPAQUE or full in _CLASSES or full in self.classes
            if not (known or (full == _MEMBER and self.classes != ()) or _DTYPE.fullmatch(full)):
                reasons = [reason for prefix, reason in _REASONS if full.startswith(prefix)]
                what = f"the pickle uses {show(full)}, which is not needed for a state dict of plain tensors; it was not run"
                raise Unsupported(what, details=reasons[:1], fix=CONVERT)
            value = self.globals[full] = Global(full)
        self.push(value)

    def persistent(self) -> None:
        match self.pop():
            case ("storage", Global(kind), str(key), _, int(elements)) if kind in STORAGES and type(elements) is int:
                self.make(Storage(kind, key, elements))
            case _:
                self.reject("a persistent id is not that of a storage: ('storage', class, key, location, number of elements)")

    def reduce(self) -> None:
        args, function = self.pop(), self.pop()
        if type(function) is not Global or type(args) is not tuple:
            self.reject(f"calls {describe(function)} with {describe(args)}; a function and a tuple are expected")
        self.make(self.call(function, args))

    def call(self, function: Global, args: tuple[Any, ...]) -> Any:
        """The record of what a function of the list would return."""
        if function.name in self.classes:
            return Instance(function.name, args)
        if function.name == _MEMBER:
            match args:
                case (Global(of), str(member)) if of in self.classes:
                    return Instance(of, (member,))
            self.reject("asks for an attribute of something that is no class of a checkpoint")
        opaque = _OPAQUE.get(function.name)
        if opaque is not None:
            return Opaque(opaque)
        make = _CALLS.get(function.name)
        record = make(self, args) if make is not None else None
        if record is None:
            self.reject(f"{function.name} cannot be called with these {len(args)} arguments")
        return record

    def new_object(self) -> None:
        args, kind = self.pop(), self.pop()
        if type(kind) is not Global or kind.name not in self.classes or type(args) is not tuple:
            self.reject(f"makes an object of {describe(kind)} with {describe(args)}")
        self.make(Instance(kind.name, args))

    def build(self) -> None:
        """Attributes of an `Instance`, or of an OrderedDict (`_metadata`), which are left out."""
        state = self.pop()
        target = self.top()
        if type(target) is Instance:
            target.state = state
            return
        if type(target) is not Mapping:
            self.reject(f"sets attributes of {describe(target)}, which has none")


def _ordered_dict(machine: _Machine, args: tuple[Any, ...]) -> Mapping | None:
    return Mapping() if not args else None


def _size(machine: _Machine, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    return args[0] if len(args) == 1 and type(args[0]) is tuple else None


def _tensor(machine: _Machine, args: tuple[Any, ...]) -> Tensor | None:
    """_rebuild_tensor(storage, first, size, stride), v2: (…, requires_grad, hooks[, metadata])."""
    if len(args) not in (4, 6, 7) or type(args[0]) is not Storage:
        return None
    return Tensor(args[0], args[1], args[2], args[3], None, len(args) == 7 and _has_bits(args[6]))


def _tensor_v3(machine: _Machine, args: tuple[Any, ...]) -> Tensor | None:
    """_rebuild_tensor_v3(storage, first, size, stride, requires_grad, hooks, dtype[, metadata])."""
    if len(args) not in (7, 8) or type(args[0]) is not Storage:
        return None
    dtype = args[6]
    if type(dtype) is not Global or not _DTYPE.fullmatch(dtype.name):
        return None
    name = dtype.name.removeprefix("torch.")
    return Tensor(args[0], args[1], args[2], args[3], name, len(args) == 8 and _has_bits(args[7]))


def _has_bits(metadata: Any) -> bool:
    """Anything but nothing, or {"conj": False, "neg": False}.

    A larger dict is not looked at: many tensors may share it.
    """
    if type(metadata) is Mapping and len(metadata.flat) <= 4:
        return any(value is not False for _, value in metadata.items())
    return metadata is not None


def _parameter(machine: _Machine, args: tuple[Any, ...]) -> Tensor | None:
    """_rebuild_parameter(data, requires_grad, hooks[, state])."""
    return args[0] if len(args) in (3, 4) and type(args[0]) is Tensor else None


def _from_type(machine: _Machine, args: tuple[Any, ...]) -> Tensor | None:
    """_rebuild_from_type_v2(function, type, args, state): a tensor with attributes of its own."""
    match args:
        case (Global() as function, Global(kind), tuple() as inner, _) if kind in _CLASSES and function.name in _TENSORS:
            return _TENSORS[function.name](machine, inner)
        case _:
            return None


_TENSORS: dict[str, Callable[[_Machine, tuple[Any, ...]], Tensor | None]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
}
_CALLS: dict[str, Callable[[_Machine, tuple[Any, ...]], Any]] = {
    **_TENSORS,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "collections.OrderedDict": _ordered_dict,
    "torch.Size": _size,
}

_OPCODES = {opcode.code.encode("latin-1"): opcode for opcode in pickletools.opcodes}
_OPERATIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": _Machine.protocol,
    "FRAME": _Machine.frame,
    "MARK": lambda m, _: m.mark(),
    "POP": lambda m, _: (m.pop(), None)[1],
    "POP_MARK": lambda m, _: (m.pop_mark(), None)[1],
    "NONE": _Machine.push,
    "NEWTRUE": lambda m, _: m.push(True),
    "NEWFALSE": lambda m, _: m.push(False),
    "BININT1": _Machine.push,  # not made: Python holds each of them once
    **dict.fromkeys(("BININT", "BININT2", "LONG1", "BINFLOAT"), _Machine.make),
    **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"), _Machine.make),
    **dict.fromkeys(("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"), lambda m, _: m.make(Opaque("bytes"))),
    **dict.fromkeys(("SHORT_BINSTRING", "BINSTRING"), lambda m, _: m.make(Opaque("bytes"))),
    "EMPTY_DICT": lambda m, _: m.make(Mapping()),
    "EMPTY_LIST": lambda m, _: m.make([]),
    "EMPTY_TUPLE": lambda m, _: m.push(()),
    "EMPTY_SET": lambda m, _: m.make(Opaque("set")),
    "ADDITEMS": lambda m, _: m.add_to_set(),
    "FROZENSET": lambda m, _: m.frozen_set(),
    "TUPLE1": lambda m, _: m.tuple_of(1),
    "TUPLE2": lambda m, _: m.tuple_of(2),
    "TUPLE3": lambda m, _: m.tuple_of(3),
    "TUPLE": lambda m, _: m.make(tuple(m.pop_mark())),
    "SETITEM": lambda m, _: m.set_items([m.pop(), m.pop()][::-1]),
    "SETITEMS": lambda m, _: m.set_items(m.pop_mark()),
    "APPEND": lambda m, _: m.append([m.pop()]),
    "APPENDS": lambda m, _: m.append(m.pop_mark()),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Machine.put),
    "MEMOIZE": lambda m, _: m.put(len(m.memo)),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine.get),
    "GLOBAL": lambda m, _: m.read_global(),
    "STACK_GLOBAL": lambda m, _: m.stack_global(),
    "BINPERSID": lambda m, _: m.persistent(),
    "REDUCE": lambda m, _: m.reduce(),
    "NEWOBJ": lambda m, _: m.new_object(),
    "BUILD": lambda m, _: m.build(),
}
