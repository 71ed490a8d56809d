"""The public names for plug-ins: this is their one list."""

# tensors
# files that tensors are read from
from weightsmith._base.files import DAMAGED as DAMAGED
from weightsmith._base.files import Opener as Opener
from weightsmith._base.files import StoredTensor as StoredTensor
from weightsmith._base.files import open_local as open_local
from weightsmith._base.files import show as show
from weightsmith._base.tensors import DTYPES as DTYPES
from weightsmith._base.tensors import TensorSpec as TensorSpec

# outputs
from weightsmith._files.hf_folder import choose_weights as choose_weights

# merge methods
from weightsmith._methods.jobs.combination import GramJob as GramJob
from weightsmith._methods.signature import merge_method as merge_method

# stored formats
from weightsmith._models.formats.config import method_of as method_of
from weightsmith._models.formats.config import plain_dtype as plain_dtype
from weightsmith._models.formats.decoded import F32 as F32
from weightsmith._models.formats.decoded import QuantisedModel as QuantisedModel
from weightsmith._models.formats.decoded import Weight as Weight
from weightsmith._models.formats.decoded import bands as bands
from weightsmith._models.formats.decoded import read_all as read_all
from weightsmith._models.formats.decoded import reader as reader
from weightsmith._models.formats.matrices import MatrixEncoding as MatrixEncoding
from weightsmith._models.sources.files import PlainFiles as PlainFiles
from weightsmith._models.sources.files import SourceFile as SourceFile
from weightsmith._models.sources.files import unite as unite
from weightsmith._outputs.compare import compare as compare
from weightsmith._outputs.manifest import MANIFEST_NAME as MANIFEST_NAME
from weightsmith._outputs.manifest import decode_manifest as decode_manifest
from weightsmith._outputs.manifest import list_files as list_files
