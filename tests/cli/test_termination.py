import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.reruns import waits_for_processes

pytestmark = waits_for_processes

# A verb that starts a daemon, says so, and waits; ending the daemon leaves a file.
VERB = """
import signal, sys, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever started the tests may have it ignored, as nohup does
from contextlib import contextmanager
from pathlib import Path
import typer
from gpuprof.cli import main as cli

@contextmanager
def daemon():
    try:
        yield
    finally:
        time.sleep(0.3)  # long enough for the same word to come twice
        Path(sys.argv[1]).write_text("ended")

def verb() -> None:
    with daemon():
        print("started", flush=True)
        time.sleep(60)

cli.build_app = lambda verbs, names_only=False: (app := typer.Typer(), app.command()(verb))[0]
sys.exit(cli.main([]))
"""


@pytest.mark.parametrize("word", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("prelude", ["", "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"])
def test_a_verb_that_is_told_to_end_ends_what_it_started(tmp_path: Path, word: int, prelude: str) -> None:
    left = tmp_path / "left"
    command = [sys.executable, "-c", prelude + textwrap.dedent(VERB), str(left)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "started\n"
        process.send_signal(word)
        process.send_signal(word)
        stderr = process.stderr.read()
    assert left.read_text() == "ended"
    assert stderr == "gpuprof: interrupted\n" and process.returncode == 130
