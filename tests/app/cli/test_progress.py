"""The bar, the lines of a log, speed and time left; with clocks that the test moves."""

from __future__ import annotations

import io

import pytest

from weightsmith._engine.local import Progress
from weightsmith._engine.product_graph import Computation
from weightsmith._execution.progress import LINE_SECONDS, Bar, Lines, Rates, Reading, meter, show_progress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_log_gets_a_line_at_once_and_then_one_every_ten_seconds() -> None:
    clock, lines = Clock(), list[str]()
    log = Lines(lines.append, clock)
    for second in range(31):
        clock.now = 100.0 + second
        log.show(Reading("merging", second * 10, 1000, second * 30_000_000_000))
    assert LINE_SECONDS == 10
    assert len(lines) == 4
    assert lines[0] == "merging:   0%, 0 bytes of 1.00 kB"
    assert lines[1] == "merging:  10%, 100 bytes of 1.00 kB, 30.0 GB/s, 1:30 left"


def test_another_label_begins_with_a_line_and_counts_anew() -> None:
    clock, lines = Clock(), list[str]()
    log = Lines(lines.append, clock)
    log.show(Reading("checking", 0, 10, 0))
    clock.now += 1
    log.show(Reading("merging", 500, 1000, 0))
    clock.now += 10
    log.show(Reading("merging", 600, 1000, 1_000_000))
    assert lines[1:] == ["merging:  50%, 500 bytes of 1.00 kB", "merging:  60%, 600 bytes of 1.00 kB, 100 kB/s, 40 s left"]


def test_work_that_takes_turns_keeps_its_time_left() -> None:
    clock, lines = Clock(), list[str]()
    log = Lines(lines.append, clock)
    for done in range(4):
        log.show(Reading("computing", done, 10, None))
        clock.now += 3
        log.show(Reading("merging", done, 10, done))
        clock.now += 3
    log.show(Reading("merging", 0, 10, 0))  # another merge
    assert lines == [
        "computing:   0%",
        "merging:   0%, 0 bytes of 10 bytes",
        "merging:  20%, 2 bytes of 10 bytes, 0 bytes/s, 48 s left",
        "merging:   0%, 0 bytes of 10 bytes",
    ]


def test_nothing_is_shown_between_two_products() -> None:
    lines = list[str]()
    show_progress(Lines(lines.append), Progress(0, 0, 0, 0, 0, 0.0, waiting=True), "merging")
    assert lines == []


def test_a_computation_shows_how_far_it_is_and_no_bytes() -> None:
    clock, lines = Clock(), list[str]()
    log = Lines(lines.append, clock)
    for done in (0, 6000):
        measured = Computation("measuring", done, 30_000)
        show_progress(log, Progress(0, 9, 0, 0, 2, 0.0, waiting=True, computation=measured), "merging")
        clock.now += 15
    assert lines == ["measuring:   0%", "measuring:  20%, 1:00 left"]


def test_the_speed_is_of_the_last_seconds_and_the_time_left_of_this_run() -> None:
    clock = Clock()
    rate = Rates(clock)
    rate.take(Reading("m", 0, 1000, 0))
    for _ in range(100):
        clock.now += 1
        speed, _ = rate.take(Reading("m", 100, 1000, 5000))
    assert speed == 0  # nothing moved for a long while
    clock.now += 1
    speed, seconds_left = rate.take(Reading("m", 101, 1000, 5100))
    assert speed == pytest.approx(10, rel=0.1)
    assert seconds_left == pytest.approx(101 * 899 / 101)


def test_no_time_left_is_guessed_from_a_thousandth_of_the_work() -> None:
    clock = Clock()
    rates = Rates(clock)
    rates.take(Reading("merging", 0, 3_020_000, 0))
    clock.now += 11  # of which kernels took ten
    assert rates.take(Reading("merging", 256, 3_020_000, 512))[1] is None
    clock.now += 1
    seconds_left = rates.take(Reading("merging", 302_000, 3_020_000, 604_000))[1]
    assert seconds_left == pytest.approx(108)


def test_a_log_says_once_what_the_work_waits_for() -> None:
    clock, lines = Clock(), list[str]()
    log = Lines(lines.append, clock)
    log.show(Reading("merging", 0, 1000, 0))
    for _ in range(3):
        log.say("compiling kernels")
        clock.now += 1
        log.show(Reading("merging", 10, 1000, 10))
    assert lines == ["merging:   0%, 0 bytes of 1.00 kB", "compiling kernels"]


def test_nothing_to_do_is_all_done() -> None:
    assert Reading("merging", 0, 0, 0).share == 1.0


def test_quiet_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    with meter(quiet=True) as shown:
        shown.show(Reading("merging", 0, 10, 0))
    assert capsys.readouterr() == ("", "")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_with_speed_and_time_left_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, clock = Terminal(), Clock()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    assert isinstance(meter(quiet=False), Bar)
    with Bar(clock) as shown:
        shown.show(Reading("[b]merging", 0, 4_000_000_000, 0))
        clock.now += 2
        shown.show(Reading("[b]merging", 1_000_000_000, 4_000_000_000, 6_000_000_000))
    text = terminal.getvalue()
    assert "[b]merging" in text  # brackets are text
    assert " 25%  1.00 GB of 4.00 GB  3.00 GB/s  6.0 s left" in text
    assert text.rstrip().endswith("\x1b[2K")  # its line is cleared at the end


def test_a_bar_shows_what_the_work_waits_for_in_place_of_its_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, clock = Terminal(), Clock()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with Bar(clock) as shown:
        shown.show(Reading("merging", 500, 1000, 0))
        clock.now += 1
        begin = len(terminal.getvalue())
        shown.say("compiling kernels")
        shown.say("too soon")
        text = terminal.getvalue()[begin:]
        assert "compiling kernels" in text
        assert "too soon" not in text
        assert "50%" not in text
        clock.now += 1
        shown.show(Reading("merging", 600, 1000, 0))
    assert " 60%  600 bytes of 1.00 kB" in terminal.getvalue()


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", Terminal())
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(meter(quiet=False), Lines)


def test_the_name_of_a_model_forges_no_line() -> None:
    lines = list[str]()
    log = Lines(lines.append)
    hostile = "fr\x1b[2J\nerror[forged]: do this"
    log.say(f"{hostile} writes text of its own")
    log.show(Reading(f"{hostile} writes", 1, 4, None))
    assert [line.startswith("fr\\x1b[2J\\nerror[forged]") and line.isprintable() for line in lines] == [True, True]
