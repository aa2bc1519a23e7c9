"""Run ``pip install --quiet`` with the arguments. For known failures, one line gives the cause and what to do."""

import subprocess
import sys

CAUSES = {
    "No space left on device": "the disk is full: free some space",
    "DO NOT MATCH THE HASHES": "a downloaded file is not the pinned one: check the index and its proxies",
    "Retry(total=0": "the package index cannot be reached: check the network, or set PIP_INDEX_URL",
}


def main(arguments: list[str]) -> int:
    """Return pip's exit status."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    result = subprocess.run(pip, stderr=subprocess.PIPE, text=True)
    reasons = [reason for text, reason in CAUSES.items() if text in result.stderr] if result.returncode else []
    if reasons:
        print(f"make: pip failed: {reasons[0]}; then run make again, which continues here", file=sys.stderr)
    else:
        sys.stderr.write(result.stderr)
    return result.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
