import os
import subprocess
from pathlib import Path

assert Path("/app/out/unit.txt").read_text() == "metre\n" and os.environ["UNIT"] == "metre"
assert subprocess.run(["python", "/usr-tools/tool.py"], capture_output=True, text=True).stdout == "tool\n"
assert os.path.exists("/app/renamed.py") and os.getcwd() == "/app"
assert float(Path("/app/answer.txt").read_text()) == 7.5
