"""A step of the installation: makes the small C library of trainer/train/pixels.py, where there is a C compiler (CC, else cc)."""

import hashlib
import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("trainer/train/pixels.c")
LIBRARY = SOURCE.with_name("libpixels.so")


class Library(BuildHookInterface):
    """Puts the library beside its source, and into a wheel, which is then one for this kind of machine."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; a failure is no error, as the kit works without the library."""
        root = Path(self.root)
        made_of = hashlib.sha256((root / SOURCE).read_bytes()).hexdigest()
        options = ["-O3", "-ffp-contract=off", "-fPIC", "-shared", f'-DSOURCE="{made_of}"']
        partial = (root / LIBRARY).with_suffix(".partial")  # a library in use is not written into
        command = [*shlex.split(os.environ.get("CC", "cc")), *options, str(root / SOURCE), "-o", str(partial)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            why = str(getattr(error, "stderr", "") or error).strip().splitlines()[-1]
            print(f"packed images will be slower, as {SOURCE} was not compiled: {why}", file=sys.stderr)  # pip --verbose
            return
        partial.replace(root / LIBRARY)
        if version == "standard":
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["force_include"][str(LIBRARY)] = str(LIBRARY)
            build_data |= {"pure_python": False, "tag": f"py3-none-{platform}"}
