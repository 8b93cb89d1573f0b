"""What attackers try, all of it: `python bench/hostile.py`, or some by name.

    python bench/hostile.py attacks --data DIR

A name is that of a file hostile_NAME.py beside this one, and what follows is for it. Without a name
each is run as it stands, one after the other; exit code 1 if any of them fails.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FILES = {
    path.stem.removeprefix("hostile_"): path for path in Path(__file__).parent.glob("hostile_*.py")
}


def main() -> None:
    name, *words = sys.argv[1:] or [""]
    if name and name not in FILES:
        sys.exit(f"{name!r} is none of {', '.join(sorted(FILES))}")
    failed = []
    for one in [name] if name else sorted(FILES):
        print(f"== {one}", flush=True)
        if subprocess.run([sys.executable, str(FILES[one]), *words], check=False).returncode:
            failed.append(one)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
