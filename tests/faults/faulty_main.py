"""The program with a rank 1 that fails."""

from __future__ import annotations

import sys
from pathlib import Path

from nanoinfer.cli.app import main
from nanoinfer.runner import ranks

ranks.WORKER_COMMAND = [sys.executable, str(Path(__file__).with_name("faulty_worker.py"))]
main()
