"""Print the answers of a `nanoinfer generate` output file for reading: python scripts/show_answers.py answers.jsonl"""

import json
import sys
import textwrap
from pathlib import Path

for line in Path(sys.argv[1]).read_text(encoding="utf-8").split("\n"):
    if line:
        record = json.loads(line)
        text = record.get("text") or record.get("message", {}).get("content") or json.dumps(record.get("error"))
        print(f"--- {record.get('custom_id')}")
        print(textwrap.shorten(" ".join(text.split()), width=400, placeholder=" ..."))
