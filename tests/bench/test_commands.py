"""Each command of bench is named by a page, a script or the command that starts it."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "Makefile", ROOT / "bench/gpu/run.sh", *ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
PAGES += ROOT.glob("bench/**/*.md")
#: Started by `bench.serving`.
STARTED = {"bench.grpc_echo", "bench.http_chain", "bench.peers.litserve_app", "bench.peers.ray_app"}


def test_no_command_of_bench_is_without_a_page() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    commands = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in ROOT.glob("bench/**/*.py")
        if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
    }
    assert commands >= STARTED
    assert {name for name in commands - STARTED if f"-m {name}" not in text} == set()
