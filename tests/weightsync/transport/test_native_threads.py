"""What is inside C++ when a process ends is waited for; what never comes out of it is not waited for for ever."""

import subprocess
import sys


def ended(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout, done.stderr


def test_the_end_of_the_process_waits_for_a_thread():
    code = "import time; from weightsync.transport.native_threads import in_native_thread as run; "
    code += "run('slow', lambda: (time.sleep(0.5), print('done', flush=True)))"
    assert ended(code) == (0, "done\n", "")


def test_the_end_of_the_process_waits_for_a_block_on_a_thread_of_somebody_elses():
    code = """
import threading, time
from weightsync.transport.native_threads import inside_native_code
inside = threading.Event()
def run():
    with inside_native_code():
        inside.set()
        time.sleep(0.5)
        print("done", flush=True)
threading.Thread(target=run, daemon=True).start()
inside.wait()
"""
    assert ended(code) == (0, "done\n", "")


def test_a_thread_that_hangs_does_not_keep_the_process():
    code = "import time; from weightsync.transport import native_threads as n; n._EXIT_SECONDS = 0.1; "
    code += "n.in_native_thread('hangs', lambda: time.sleep(3600))"
    assert ended(code) == (0, "", "")


def test_what_ends_badly_is_not_counted_any_more():
    code = """
import threading
from weightsync.transport import native_threads
def refuse(thread):
    raise RuntimeError("can't start new thread")
def fail():
    with native_threads.inside_native_code():
        print(native_threads._num_inside)
        raise ValueError("here")
threading.Thread.start = refuse
for function in (fail, lambda: native_threads.in_native_thread("none", fail)):
    try:
        function()
    except (ValueError, RuntimeError) as error:
        print(error, native_threads._num_inside)
"""
    assert ended(code) == (0, "1\nhere 0\ncan't start new thread 0\n", "")
