"""`make gpu-test`: the tests that need a GPU, from the wheel in dist/ if there is one.

Runs the Python tests marked `gpu` and, where they are found, the Rust driver (dist/gpu_driver, built by
`make gpu-driver`) alone and under compute-sanitizer. Further arguments go to pytest.
"""

import shutil
import subprocess
import sys

from package import ROOT, environment


def main() -> int:
    """Run everything; the number of parts that failed."""
    env = environment()
    failed = []

    def part(name: str, *command: str) -> None:
        print(f"== {name}: {' '.join(command)}", flush=True)
        if subprocess.run(command, env=env, cwd=ROOT).returncode:
            failed.append(name)

    part("info", sys.executable, "-m", "xla_attention", "info")
    driver = ROOT / "dist/gpu_driver"
    if driver.is_file():
        part("driver", str(driver))
        if sanitizer := shutil.which("compute-sanitizer"):
            part("memcheck", sanitizer, "--tool", "memcheck", "--error-exitcode", "7", str(driver), "--small")
        else:
            print("compute-sanitizer is not on PATH: memcheck skipped")
    else:
        print("dist/gpu_driver is not there (`make gpu-driver`): driver and memcheck skipped")
    part("pytest", sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", *sys.argv[1:])
    print("failed: " + ", ".join(failed) if failed else "all parts passed")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
