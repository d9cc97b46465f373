# SPDX-License-Identifier: Apache-2.0
"""ATTN_TRACE: the file is an array of JSON, its spans lie within each other and have the names of their operations."""
import json
import os
import signal
import subprocess
import sys
import tempfile
import time

models, run, fake_device = sys.argv[1:4]
folder = tempfile.mkdtemp()
path = os.path.join(folder, "trace.json")


def start(model, more=None, **options):
    """attn-run over two layers of a model."""
    environment = {**os.environ, "ATTN_TRACE": path, **(more or {})}
    command = [run, "--model", f"{models}/{model}.json", "--layers", "2", "--steps", "4", "--scale", "0.1"]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def trace(model, more=None):
    """The events of a run that succeeds, and those of the device's tracks."""
    if os.path.exists(path):
        os.remove(path)
    process = start(model, more)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    return read()


def read():
    with open(path, encoding="utf-8") as file:
        text = file.read()
    assert text.startswith("[\n") and text.endswith("},\n"), text[-80:]
    events = json.loads(text + "{}]")[:-1]
    spans = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and event["pid"] > 0 for event in spans)
    return events, [e for e in spans if e["tid"] < 1 << 24], [e for e in spans if e["tid"] >= 1 << 24]


def parents(spans):
    """Each span's name with the one that it lies in; no two overlap otherwise."""
    found, open_spans = [], []
    for span in sorted(spans, key=lambda s: (s["tid"], s["ts"], -s["dur"])):
        end = span["ts"] + span["dur"]
        while open_spans and (open_spans[-1]["tid"] != span["tid"] or open_spans[-1]["ts"] + open_spans[-1]["dur"] <= span["ts"]):
            open_spans.pop()
        if open_spans:
            assert end <= open_spans[-1]["ts"] + open_spans[-1]["dur"] + 0.002, (span, open_spans[-1])
        found.append((span["name"], open_spans[-1]["name"] if open_spans else None))
        open_spans.append(span)
    return found


CALLS = {"select", "bind", "plan_create", "plan_batch", "run"}
for model, names in {
    "llama-3.1-8b": {"write_kv", "attend"},
    "gemma-2-9b": {"write_kv", "attend"},
    "deepseek-v3": {"write_kv", "attend_mla", "attend new keys", "attend context", "batched_gemm", "gather_kv", "merge_states"},
    "qwen3-next-80b-a3b": {"write_kv", "attend", "recurrent"},
}.items():
    _, spans, _ = trace(model, {"ATTN_BACKEND": "cpu_ref"})
    found = set(parents(spans))
    assert {name for name, inside in found if inside is None} == CALLS, found
    inside = {name for name, parent in found if parent == "run"}
    assert inside == names, (model, inside)
    for span in spans:
        args = span["args"]
        if span["name"] == "run":
            assert args["layer"] and args["prefill"] == args["decode"] == "cpu_ref" and args["status"] == 0, span
        elif span["name"] in ("write_kv", "attend"):
            assert args["backend"] == "cpu_ref" and args["bytes"] > 0 and args.get("rows", 1) > 0, span
    attends = [s["args"] for s in spans if s["name"] in ("attend", "attend_mla") and s["args"]["phase"] == "decode"]
    assert attends and all(a["keys"] >= a["requests"] > 0 for a in attends), attends

# One step in three: the first and the fourth; runs follow their plan.
whole = [s["args"]["step"] for s in trace("llama-3.1-8b")[1] if s["name"] == "plan_batch"]
part = trace("llama-3.1-8b", {"ATTN_TRACE_EVERY": "3"})[1]
some = [s["args"]["step"] for s in part if s["name"] == "plan_batch"]
assert some == whole[::3], (some, whole)
assert {s["args"]["step"] for s in part if s["name"] == "run"} == set(some)

# A device's own times stand on a track of its own, and within those of the host where it works at once.
events, spans, device = trace("deepseek-v3", {"ATTN_PLUGIN_PATH": fake_device, "ATTN_BACKEND": "fake_device"})
tracks = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
assert device and all("fake_device on " in tracks[e["tid"]] for e in device), tracks
kernels = [s for s in spans if "backend" in s["args"]]
assert sorted(s["name"] for s in kernels) == sorted(s["name"] for s in device)
assert {s["args"]["layer"] for s in device if s["name"] == "write_kv"} == {0, 1}
for host, own in zip(sorted(kernels, key=lambda s: s["ts"]), sorted(device, key=lambda s: s["ts"])):
    assert host["name"] == own["name"] and abs(host["ts"] - own["ts"]) < 50e3, (host, own)

# Processes at once write whole lines into one file, and one that is killed leaves such lines.
os.remove(path)
both = [start("llama-3.1-8b"), start("gemma-2-9b")]
assert all(process.communicate() and process.returncode == 0 for process in both)
events, spans, _ = read()
assert len({e["pid"] for e in events}) == 2
killed = start("deepseek-v3")
while killed.poll() is None and os.path.getsize(path) < 100000:
    killed.send_signal(signal.SIGKILL) if len({s["pid"] for s in read()[1]}) == 3 else time.sleep(0.01)
killed.communicate()
assert len({s["pid"] for s in read()[1]}) == 3

# What cannot be traced is said before anything runs, but for a disk that fills up later.
with open(os.path.join(folder, "text"), "w", encoding="utf-8") as other:
    other.write("of the user\n")
os.symlink(path, os.path.join(folder, "link"))
for more, wanted in [
    ({"ATTN_TRACE": "trace.json"}, "ATTN_TRACE: 'trace.json' is not an absolute path"),
    ({"ATTN_TRACE": f"{folder}/no/trace.json"}, "No such file or directory"),
    ({"ATTN_TRACE": "/proc/trace.json"}, "ATTN_TRACE: /proc/trace.json: "),
    ({"ATTN_TRACE": "/dev/full"}, "ATTN_TRACE: /dev/full: No space left on device"),
    ({"ATTN_TRACE": folder}, "Is a directory"),
    ({"ATTN_TRACE": f"{folder}/text"}, "is there and is no trace"),
    ({"ATTN_TRACE": f"{folder}/link"}, "symbolic links"),
    ({"ATTN_TRACE_EVERY": "0"}, "ATTN_TRACE_EVERY: '0' is not a number of steps; 1 to 999999999 are allowed"),
    ({"ATTN_TRACE_EVERY": "2x"}, "ATTN_TRACE_EVERY: '2x' is not"),
    ({"ATTN_TRACE_EVERY": "-1"}, "ATTN_TRACE_EVERY: '-1' is not"),
]:
    process = start("llama-3.1-8b", more)
    _, errors = process.communicate()
    assert process.returncode == 1 and wanted in errors, (more, process.returncode, errors)
assert open(os.path.join(folder, "text"), encoding="utf-8").read() == "of the user\n"
assert os.stat(path).st_mode & 0o777 == 0o600
limit = f"ulimit -f 4; exec {run} --model {models}/deepseek-v3.json --layers 2 --steps 8 --scale 0.1"
os.remove(path)
full = subprocess.run(["sh", "-c", limit], env={**os.environ, "ATTN_TRACE": path, "ATTN_CACHE_DIR": ""}, capture_output=True, text=True, check=False)
assert full.returncode == 0 and full.stderr.count("nothing more is written to it") == 1, full
subprocess.run(["rm", "-rf", folder], check=True)
