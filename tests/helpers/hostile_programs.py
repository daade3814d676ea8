"""Programs that try to leave the sandbox, and programs that try to pass tests without knowing an answer.

Each escape notes in `loot` whatever it could do that it should not. Should one succeed, little harm is done: what it changes
is the test's own, elsewhere it only tries whether it could, and what it takes has a bound. Each cheat defines `answer`, of
which no test knows a value that could be guessed.
"""

from __future__ import annotations

HEAD = """
import ctypes, errno, os, platform, signal, socket, struct, sys, time

loot = []


def attempt(what, action):
    try:
        found = action()
    except Exception:
        return
    loot.append(what + " " + repr(found)[:200])


libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
ON_X86 = platform.machine() == "x86_64"


def syscall(x86, arm, *args):
    number = x86 if ON_X86 else arm
    result = libc.syscall(ctypes.c_long(number), *(ctypes.c_long(a) if isinstance(a, int) else a for a in args))
    if result == -1:
        raise OSError(ctypes.get_errno(), "refused")
    return result


def answer(x):
    return None
"""

ESCAPES = {
    "the environment": """
attempt("environ", lambda: [v for v in os.environ.values() if "canary" in v][0])
for pid in ("self", "1", str(os.getppid()), "{host}"):
    attempt("environ of " + pid, lambda: open("/proc/" + pid + "/environ", "rb").read())
    attempt("command line of " + pid, lambda: open("/proc/" + pid + "/cmdline", "rb").read())
""",
    "files of the host": """
for path in ("{file}", "/etc/passwd", "/etc/shadow", "/etc/hostname", "/root/.bashrc", "/proc/version", "/proc/kallsyms"):
    attempt("read " + path, lambda: open(path, "rb").read(10))
    attempt("descriptor of " + path, lambda: os.open(path, os.O_RDONLY))
for path in ("{folder}", "/home", "/proc", "/sys", "/var", "/dev/shm", "/boot"):
    attempt("list " + path, lambda: os.listdir(path))
""",
    "writing outside": """
attempt("overwrite", lambda: open("{file}", "w").write("x"))
attempt("append", lambda: open("{file}", "a").write("x"))
attempt("create", lambda: open("{folder}/new", "w"))
attempt("folder", lambda: os.mkdir("{folder}/new"))
for folder in ("{folder}", "/", "/usr/lib", "/etc", "/var/tmp", "/dev/shm", "/dev", "/root", os.path.dirname(os.__file__)):
    attempt("nameless file in " + folder, lambda: os.open(folder, os.O_TMPFILE | os.O_RDWR))
""",
    "changing what is outside": """
for path in ("{file}", "{folder}"):
    attempt("mode of " + path, lambda: os.chmod(path, 0o700))
    attempt("owner of " + path, lambda: os.chown(path, os.getuid(), os.getgid()))
    attempt("times of " + path, lambda: os.utime(path, (1, 1)))
    attempt("attribute of " + path, lambda: os.setxattr(path, "user.x", b"x"))
    attempt("length of " + path, lambda: os.truncate(path, 0))
    attempt("delete " + path, lambda: os.unlink(path))
    attempt("move " + path, lambda: os.rename(path, "stolen"))
    attempt("link to " + path, lambda: os.link(path, "linked"))
    attempt("open to write " + path, lambda: os.open(path, os.O_RDWR))
library = os.__file__
attempt("the library to write", lambda: os.open(library, os.O_RDWR))
for path in (library, os.path.dirname(library)):
    attempt("the mode it has", lambda: os.chmod(path, os.stat(path).st_mode & 0o777))
    attempt("the owner it has", lambda: os.chown(path, -1, -1))
    attempt("its own mode by descriptor", lambda: os.fchmod(os.open(path, os.O_RDONLY), os.stat(path).st_mode & 0o777))
""",
    "symbolic links to the outside": """
os.symlink("{file}", "link")
os.symlink("{folder}", "way")
os.symlink("/proc/self/root", "root")
attempt("read", lambda: open("link").read())
attempt("write", lambda: open("link", "w"))
attempt("create", lambda: open("way/new", "w"))
attempt("up", lambda: open("../../../../../../../../{file}").read())
attempt("root", lambda: os.listdir("root/etc"))
""",
    "connections": """
def reach(family, kind, address):
    with socket.socket(family, kind) as end:
        end.settimeout(0.2)
        end.connect(address)
        end.send(b"out")
attempt("TCP", lambda: reach(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", {port})))
attempt("TCP to another machine", lambda: reach(socket.AF_INET, socket.SOCK_STREAM, ("198.51.100.1", 80)))
attempt("UDP", lambda: reach(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", {port})))
attempt("IPv6", lambda: reach(socket.AF_INET6, socket.SOCK_STREAM, ("::1", {port})))
attempt("local", lambda: reach(socket.AF_UNIX, socket.SOCK_STREAM, "{folder}/socket"))
attempt("abstract", lambda: reach(socket.AF_UNIX, socket.SOCK_STREAM, "\\0{abstract}"))
attempt("raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
attempt("packets", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
attempt("netlink", lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))
attempt("listen", lambda: socket.create_server(("127.0.0.1", 0)))
""",
    "datagrams through a pair": """
def reach():
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    one.sendto(b"out", "{folder}/datagrams")
attempt("datagram", reach)
attempt("a pair of another kind", lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
one, other = socket.socketpair()
attempt("a stream with an address", lambda: one.sendto(b"out", "{folder}/datagrams"))
attempt("bind", lambda: one.bind("{folder}/bound"))
""",
    "descriptors to the caller": """
import array
one = socket.socket(fileno=os.dup(3))
attempt("send one", lambda: one.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0]))]))
attempt("receive one", lambda: one.recvmsg(1, 64, socket.MSG_DONTWAIT))
""",
    "descriptors that were left open": """
import fcntl
def is_open(number):
    try:
        fcntl.fcntl(number, fcntl.F_GETFD)
        return True
    except OSError:
        return False
loot += [number for number in range(4, 5000) if is_open(number)]
""",
    "signals to others": """
for pid in ({canary}, {host}, *([] if os.getppid() < 2 else [os.getppid()])):
    number = signal.SIGKILL if pid == {canary} else 0
    attempt("kill", lambda: os.kill(pid, number))
    attempt("descriptor of process", lambda: os.pidfd_open(pid))
    attempt("thread", lambda: syscall(234, 131, pid, pid, number))
    attempt("queue", lambda: syscall(129, 138, pid, number, ctypes.create_string_buffer(128)))
    attempt("group", lambda: os.killpg(pid, number))
""",
    "signals by way of a descriptor": """
import fcntl
one, other = socket.socketpair()
attempt("owner", lambda: fcntl.fcntl(one, fcntl.F_SETOWN, {canary}))
attempt("owner, extended", lambda: fcntl.fcntl(one, 15, struct.pack("ii", 1, {canary})))
attempt("signal", lambda: fcntl.fcntl(one, 10, signal.SIGKILL))
attempt("owner by control", lambda: fcntl.ioctl(one, 0x8901, struct.pack("i", {canary})))
fcntl.fcntl(one, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
other.send(b"x")
""",
    "signals to its own group": """
if os.getpgrp() != os.getpid():  # 0 is that of someone outside of its namespace
    loot.append(os.getpgrp())
if os.getsid(0) != os.getpid():
    loot.append(os.getsid(0))
""",
    "memory of others": """
def read_memory(pid):
    class Vector(ctypes.Structure):
        _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
    room = ctypes.create_string_buffer(16)
    mine, theirs = Vector(ctypes.addressof(room), 16), Vector({address}, 16)
    return syscall(310, 270, pid, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0), room.raw
for pid in ({host}, os.getppid(), {canary}):
    attempt("read", lambda: read_memory(pid))
    attempt("attach", lambda: syscall(101, 117, 16, pid, 0, 0))
    attempt("seize", lambda: syscall(101, 117, 0x4206, pid, 0, 0))
    attempt("file", lambda: open("/proc/" + str(pid) + "/mem", "rb"))
    attempt("maps", lambda: open("/proc/" + str(pid) + "/maps").read())
attempt("traced by the parent", lambda: syscall(101, 117, 0, 0, 0, 0))
attempt("compare", lambda: syscall(312, 272, {host}, {canary}, 0, 0, 0))
""",
    "processes that are seen": """
attempt("list", lambda: [name for name in os.listdir("/proc") if name.isdigit()])
attempt("exists", lambda: os.kill({canary}, 0))
attempt("priority", lambda: os.setpriority(os.PRIO_PROCESS, {canary}, 5))
attempt("limits", lambda: __import__("resource").prlimit({canary}, 7))
attempt("processors", lambda: os.sched_setaffinity({canary}, [0]))
""",
    "more rights": """
attempt("root", lambda: os.setuid(0))
attempt("group", lambda: os.setgid(0))
attempt("groups", lambda: os.setgroups([0]))
attempt("all ids", lambda: os.setresuid(0, 0, 0))
head = (ctypes.c_uint32 * 2)(0x20080522, 0)
attempt("capabilities", lambda: syscall(126, 91, head, (ctypes.c_uint32 * 6)(*[0xFFFFFFFF] * 6)))
attempt("no filter", lambda: syscall(317, 277, 0, 0, None))
attempt("keep capabilities", lambda: syscall(157, 167, 8, 1, 0, 0, 0))
attempt("ambient", lambda: syscall(157, 167, 47, 2, 21, 0, 0))
attempt("dumpable", lambda: syscall(157, 167, 4, 1, 0, 0, 0))
attempt("a life without the parent", lambda: syscall(157, 167, 1, 0, 0, 0, 0))
""",
    "namespaces and mounts": """
for flag in (0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000, 0x2000000, 0x80):
    attempt("unshare", lambda: syscall(272, 97, flag))
    if flag > 0xFF:
        attempt("clone", lambda: syscall(56, 220, flag | 17, 0, 0, 0, 0) or os._exit(0))
attempt("clone3", lambda: syscall(435, 435, (ctypes.c_uint64 * 11)(0x10000000), 88) or os._exit(0))
attempt("enter", lambda: syscall(308, 268, 0, 0))
attempt("mount", lambda: syscall(165, 40, b"none", b".", b"tmpfs", 0, 0))
attempt("unmount", lambda: syscall(166, 39, b".", 2))
attempt("root", lambda: syscall(155, 41, b".", b"."))
attempt("chroot", lambda: os.chroot("."))
attempt("open tree", lambda: syscall(428, 428, -100, b"/", 1))
attempt("new mount", lambda: syscall(430, 430, b"tmpfs", 0))
""",
    "rare system calls": """
room = ctypes.create_string_buffer(256)
for what, x86, arm, args in (
    ("bpf", 321, 280, (0, room, 72)), ("performance", 298, 241, (room, 0, -1, -1, 0)), ("io_uring", 425, 425, (8, room)),
    ("userfault", 323, 282, (0,)), ("keys", 248, 217, (b"user", b"x", b"x", 1, -3)), ("memory file", 319, 279, (b"x", 0)),
    ("shared memory", 29, 194, (0, 4096, 0o1600)), ("semaphores", 64, 190, (0, 1, 0o1600)),
    ("messages", 68, 186, (0, 0o1600)), ("posix messages", 240, 180, (b"x", 0o102, 0o600, 0)),
    ("watch", 294, 26, (0,)), ("watch all", 300, 262, (0, 0)), ("by handle", 304, 265, (-100, room, 0)),
    ("log", 103, 116, (3, room, 10)), ("personality", 135, 92, (0x40000,)),
    ("lock memory", 151, 230, (1,)), ("device", 259, 33, (-100, b"device", 0o20666, 0x501)),
    ("pipe by name", 259, 33, (-100, b"pipe", 0o10600, 0)),
    ("splice", 275, 76, (0, 0, 1, 0, 1, 0)), ("ports", 173, 9999, (0, 1, 1)), ("secret memory", 447, 447, (0,)),
):
    attempt(what, lambda: syscall(x86, arm, *args))
""",
    "newer system calls": """
room = ctypes.create_string_buffer(4096)
for what, number, args in (
    ("a descriptor of a process", 438, (0, 0, 0)), ("signal by descriptor", 424, (0, 0, 0, 0)),
    ("advice", 440, (0, room, 1, 21, 0)),
    ("reap memory", 448, (0, 0)), ("io_uring, enter", 426, (3, 0, 0, 0, 0, 0)), ("io_uring, register", 427, (3, 0, 0, 0)),
    ("move a mount", 429, (-100, b".", -100, b".", 0)), ("pick a mount", 433, (-100, b".", 0)),
    ("attributes of a mount", 442, (-100, b".", 0, room, 32)), ("list mounts", 458, (room, room, 1, 0)),
    ("a mount's state", 457, (room, room, 4096, 0)), ("security modules", 459, (100, room, room, 0)),
    ("rules of its own", 444, (0, 0, 1)), ("protected memory", 462, (room, 4096, 0)),
    ("what is cached", 451, (1, room, room, 0)),
):
    attempt(what, lambda: syscall(number, number, *args))
""",
    "sockets and priorities": """
room = ctypes.create_string_buffer(64)
for what, x86, arm, args in (
    ("to the hypervisor", 41, 198, (40, 1, 0)), ("to the kernel's ciphers", 41, 198, (38, 5, 0)),
    ("Bluetooth", 41, 198, (31, 3, 1)),
    ("accept", 43, 202, (3, 0, 0)), ("connect", 42, 203, (3, room, 16)), ("options", 54, 208, (3, 1, 32, room, 4)),
    ("many messages", 307, 269, (3, room, 1, 0)), ("processors", 203, 122, (0, 8, b"\\xff" * 8)),
    ("real time", 144, 119, (0, 1, room)), ("deadline", 314, 274, (0, room, 0)), ("priority", 141, 140, (0, 0, -5)),
    ("priority of input", 251, 30, (1, 0, 0x2000)), ("timers", 222, 107, (1, 0, room)), ("lock a file", 73, 32, (1, 2)),
    ("keys", 250, 219, (0, -3, 1, 0, 0)), ("ask for a key", 249, 218, (b"user", b"x", b"", -3)),
    ("memory into a pipe", 278, 75, (1, room, 1, 0)), ("memory policy", 237, 235, (0, 0, 0, 0, 0, 0)),
    ("everything to disk", 162, 81, ()),
):
    attempt(what, lambda: syscall(x86, arm, *args))
""",
    "pipes that are filled": """
import fcntl
size, held = 0, []
try:
    while len(held) < 500:
        held.append(os.pipe())
        attempt("a larger one", lambda: fcntl.fcntl(held[-1][1], 1031, 1 << 20))
        os.set_blocking(held[-1][1], False)
        try:
            while True:
                size += os.write(held[-1][1], bytes(1 << 16))
        except BlockingIOError:
            pass
except OSError:
    pass
if size > 8 << 20:
    loot.append(size)
for ends in held:
    for end in ends:
        os.close(end)
""",
    "folders that change places with links": """
os.makedirs("folder/inner")
open("folder/inner/file", "w").close()
os.symlink("{folder}", "link")
end = time.monotonic() + 0.3
while time.monotonic() < end:
    try:
        syscall(316, 276, -100, b"folder", -100, b"link", 2)
        syscall(316, 276, -100, b"link", -100, b"folder", 2)
    except OSError:
        break
attempt("through it", lambda: os.listdir("link/") if os.path.islink("link") else 1 / 0)
""",
    "other programs": """
import subprocess
for command in ("/bin/sh", "/bin/true", "/usr/bin/env", sys.executable, "/lib64/ld-linux-x86-64.so.2"):
    attempt("run " + command, lambda: subprocess.run([command, "-c", "1"], check=True))
    attempt("become " + command, lambda: os.execv(command, [command, "-c", "1"]))
attempt("shell", lambda: os.system("true") == 0 or 1 / 0)
attempt("spawn", lambda: os.posix_spawn("/bin/true", ["true"], {}))
attempt("by descriptor", lambda: os.execve(os.open(os.__file__, os.O_RDONLY), ["x"], {}))
""",
    "a program of its own making": """
with open("made", "wb") as file:
    file.write(b"#!/bin/sh\\ntrue\\n")
attempt("executable", lambda: os.chmod("made", 0o755))
file = os.open("made2", os.O_CREAT | os.O_WRONLY, 0o777)
os.write(file, b"\\x7fELF")
os.close(file)
attempt("run", lambda: os.execv("./made2", ["made2"]))
""",
    "terminals and devices": """
import fcntl
for path in ("/dev/tty", "/dev/console", "/dev/mem", "/dev/kmsg", "/dev/vda", "/dev/fuse", "/dev/kvm", "/dev/ptmx"):
    attempt("open " + path, lambda: os.open(path, os.O_RDWR))
for number in (0, 1, 2, 3):
    attempt("type", lambda: fcntl.ioctl(number, 0x5412, b"x"))
    attempt("foreground", lambda: os.tcsetpgrp(number, os.getpid()))
attempt("session", lambda: os.setsid())
attempt("device", lambda: os.mknod("device", 0o20666, os.makedev(1, 1)))
""",
    "limits raised": """
import resource
for kind in range(16):
    soft, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        attempt("limit " + str(kind), lambda: resource.setrlimit(kind, (hard + 1, hard + 1)))
""",
    "processes without end": """
import time
count = 0
try:
    while count < 200:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        count += 1
except OSError:
    pass
if count > 20:
    loot.append(count)
""",
    "threads without end": """
import threading
threading.stack_size(32768)
def stay():
    time.sleep(60)
count = 0
try:
    while count < 500:
        threading.Thread(target=stay, daemon=True).start()
        count += 1
except RuntimeError:
    pass
if count > 20:
    loot.append(count)
""",
    "orphans": """
def leave():
    if os.fork() == 0:
        if os.fork() == 0:
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            while True:
                time.sleep(1)
        os._exit(0)
try:
    leave()
except OSError:
    pass
""",
    "memory without end": """
held = []
try:
    while len(held) < 64:
        held.append(bytearray(1 << 24))
except MemoryError:
    pass
if len(held) > 32:
    loot.append(len(held))
held.clear()
""",
    "memory through mappings": """
import mmap
held = []
try:
    while len(held) < 64:
        held.append(mmap.mmap(-1, 1 << 24))
except OSError:
    pass
if len(held) > 32:
    loot.append(len(held))
""",
    "a large file": """
size = 0
try:
    with open("large", "wb") as file:
        while size < 64 << 20:
            size += file.write(bytes(1 << 20))
            file.flush()
except OSError:
    pass
if size > 20 << 20:
    loot.append(size)
os.unlink("large")
""",
    "large files without number": """
size = 0
try:
    for number in range(100):
        with open(f"large {number}", "wb") as file:
            for _ in range(8):
                file.write(bytes(1 << 20))
                size += 1 << 20
except OSError:
    pass
time.sleep(0.3)
if size > 40 << 20:
    loot.append(size)
""",
    "files without number": """
count = 0
try:
    while count < 20000:
        os.close(os.open(f"file {count}", os.O_CREAT | os.O_WRONLY))
        count += 1
except OSError:
    pass
if count > 2000:
    time.sleep(2)  # somebody looks now and then
    loot.append(count)
""",
    "folders without bottom": """
try:
    for number in range(3000):
        os.mkdir("d" * 200)
        os.chdir("d" * 200)
except OSError:
    pass
time.sleep(0.3)
""",
    "folders that may not be looked at": """
os.mkdir("closed", 0)
os.mkdir("open")
os.mkdir("open/closed", 0)
time.sleep(0.2)
""",
    "descriptors without number": """
held = []
try:
    while len(held) < 500:
        held += os.pipe()
except OSError:
    pass
if len(held) > 100:
    loot.append(len(held))
for number in held:
    os.close(number)
""",
    "other interpreters' leavings": """
import gc
words = [x for x in gc.get_objects() if isinstance(x, (dict, list)) and "canary" in repr(x)[:100000] and x is not globals()]
loot += [repr(x)[:100] for x in words if "{secret}" in repr(x)]
""",
}
"""What -> code behind `HEAD`. Names in braces are filled in with what the test watches."""

ENDLESS = {
    "system calls of 32 bits": """
import mmap
code = bytes.fromhex("b814000000cd80c3") if ON_X86 else bytes.fromhex("c0035fd6")  # getpid by int 0x80; return
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(code)
function = ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
found = function()
if ON_X86 and found > 0:
    loot.append("32 bits " + str(found))
""",
    "system calls of another interface": """
if ON_X86:
    attempt("x32", lambda: syscall(0x40000000 + 39, 0))
else:
    os._exit(1)
""",
    "output without end": """
while True:
    print("x" * 10000)
""",
    "deaf to signals": """
for number in range(1, 32):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True:
    pass
""",
    "asleep": "time.sleep(1000)",
    "busy in C": "int('9' * 4000) ** (10 ** 9)",
    "a regular expression without end": "import re; re.match('(a*)*b', 'a' * 50)",
    "a stack that overflows": """
sys.setrecursionlimit(10 ** 9)
def down():
    return down()
down()
""",
    "a crash": "ctypes.string_at(0)",
    "abort": "os.abort()",
    "a caller that is not answered": "os.close(3); time.sleep(1000)",
}
"""Those that do not come to their end, or whose process does not."""

WATCHED = ("file", "folder", "port", "abstract", "host", "canary", "address", "secret")


def filled(code: str, **watched: object) -> str:
    assert set(watched) == set(WATCHED)
    for name, value in watched.items():
        code = code.replace("{" + name + "}", str(value))
    return HEAD + code


CHEATS = {
    "exit before the tests": "import sys; sys.exit(0)",
    "exit at once": "import os; os._exit(0)",
    "exit when asked": "def answer(x): raise SystemExit(0)",
    "interrupt": "def answer(x): raise KeyboardInterrupt",
    "an assertion of its own": "def answer(x): raise AssertionError",
    **{
        f"the signal {name}": f"def answer(*given): raise {name}"
        for name in (
            "StopIteration",
            "StopIteration(given)",
            "StopAsyncIteration",
            "GeneratorExit",
            "IndexError",
            "KeyError",
            "LookupError",
            "AttributeError",
            "TypeError",
            "NotImplementedError",
            "ImportError",
            "EOFError",
            "StopIteration from StopIteration()",
            "RuntimeError('generator raised StopIteration')",
        )
    },
    "a signal of asyncio's": "import asyncio\ndef answer(*given): raise asyncio.CancelledError",
    **{
        f"a kind of {name} under {other}": f"""
class Own({name}): pass
Own.__name__ = Own.__qualname__ = "{other}"
def answer(*given): raise Own
"""
        for name, other in (
            ("StopIteration", "Own"),
            ("Exception", "StopIteration"),
            ("StopIteration", "IndexError"),
            ("KeyError", "AttributeError"),
            ("BaseException", "StopAsyncIteration"),
            ("StopIteration", "KeyError"),
        )
    },
    "a signal at the second call": """
calls = []
def answer(*given):
    calls.append(given)
    if len(calls) > 1: raise StopIteration
    return 0
""",
    "signals of a class": """
class Ends:
    def __getattr__(self, name): raise StopIteration
    def __getitem__(self, key): raise StopIteration
    def __next__(self): raise StopAsyncIteration
    def __iter__(self): raise StopIteration
    def __len__(self): raise StopIteration
    def __str__(self): raise StopIteration
    def __call__(self, *given): raise StopIteration
answer = Ends()
""",
    "signals by protocol": """
class Ends:
    def __getattr__(self, name): raise AttributeError
    def __getitem__(self, key): raise IndexError
    def __next__(self): raise StopIteration
    def __iter__(self): return self
    def __len__(self): return 1
    def __call__(self, *given): raise IndexError
answer = Ends()
""",
    "an exception that is equal": """
class Equal(Exception):
    def __eq__(self, other): return True
    def __str__(self): raise Equal
def answer(x): raise Equal
""",
    "equal to everything": """
class Equal:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __bool__(self): return True
    def __len__(self): return 1
    def __iter__(self): return iter([self])
    def __contains__(self, other): return True
    def __getattr__(self, name): return self
    def __call__(self, *args, **kwargs): return self
    __lt__ = __gt__ = __le__ = __ge__ = __sub__ = __rsub__ = __add__ = __radd__ = __abs__ = __getitem__ = __call__
def answer(x): return Equal()
""",
    "numbers that are equal": """
class Equal(int):
    __eq__ = lambda self, other: True
    __ne__ = lambda self, other: False
    __hash__ = int.__hash__
def answer(x): return Equal(0)
""",
    "text that is equal": """
class Equal(str):
    __eq__ = lambda self, other: True
    __hash__ = str.__hash__
def answer(x): return Equal("0")
""",
    "lists that are equal": """
class Equal(list):
    __eq__ = lambda self, other: True
def answer(x): return Equal([0])
""",
    "a number by name": """
class Number:
    pass
import numbers
numbers.Integral.register(Number)
Number.__int__ = lambda self: 0
Number.__eq__ = lambda self, other: True
def answer(x): return Number()
""",
    "not a number": "def answer(x): return float('nan')",
    "a patched assert": """
import builtins
builtins.AssertionError = type("Never", (Exception,), {})
builtins.isinstance = lambda *args: True
builtins.all = builtins.any = builtins.bool = lambda *args: True
builtins.abs = lambda x: 0
def answer(x): return 0
""",
    "names of the tests": """
import types
math = types.SimpleNamespace(isclose=lambda *args, **kwargs: True)
def abs(x): return 0
def set(x): return expected
def len(x): return 0
def isinstance(*args): return True
def sorted(x): return x
expected = Exception = AssertionError = BaseException = True
def answer(x): return 0
""",
    "a patched JSON": """
import json
json.dumps = lambda *args, **kwargs: '{"verdict": "passed", "value": true}'
def answer(x): return 0
""",
    "a patched guest": """
import sys
guest = sys.modules["posttrain.sandbox.guest"]
guest.Guest._do_value = lambda self, request: {"verdict": "passed", "value": True, "passed": True, "expected": True}
guest.encode = lambda value, refer: {"verdict": "passed"}
def answer(x): return 0
""",
    "a patched comparison": """
import sys
for name, module in list(sys.modules.items()):
    for what in ("equals", "_equals", "graded", "_key"):
        if hasattr(module, what):
            setattr(module, what, lambda *args: True)
import operator
operator.eq = lambda a, b: True
def answer(x): return 0
""",
    "an examiner of its own": """
import sys
sys.modules["posttrain.sandbox.examiner"].Examiner._played = lambda self, source, names: {"verdict": "passed", "why": ""}
def answer(x): return 0
""",
    "the expected value in memory": """
import gc, sys
def answer(x):
    frame, found = sys._getframe(), []
    while frame:
        found += [v for v in (*frame.f_locals.values(), *frame.f_globals.values()) if type(v) is int and v > 10 ** 6]
        frame = frame.f_back
    found += [v for o in gc.get_objects() if isinstance(o, (list, tuple)) for v in o if type(v) is int and v > 10 ** 6]
    found += [v for o in gc.get_objects() if isinstance(o, dict) for v in o.values() if type(v) is int and v > 10 ** 6]
    return found[-1] if found else None
""",
    "the tests in memory": """
import gc, re
def answer(x):
    text = " ".join(o for d in gc.get_objects() if isinstance(d, (dict, list, tuple)) for o in
                    (d.values() if isinstance(d, dict) else d) if isinstance(o, str) and "assert" in o and "answer" in o)
    found = re.findall(r"== (\\d+)", text)
    return int(found[-1]) if found else None
""",
    "the tests in raw memory": """
import ctypes, re
def answer(x):
    best = None
    for line in open("/proc/self/maps"):
        low, high = (int(part, 16) for part in line.split()[0].split("-"))
        found = re.findall(rb"answer\\(1\\) == (\\d+)", ctypes.string_at(low, high - low))
        best = int(found[0]) if found else best
    return best
""",
    "the tests in files": """
import glob, os, re
def answer(x):
    for root in ("/", "/tmp", "/work", "/proc/self/fd", "."):
        for path in glob.glob(root + "/**/*", recursive=True)[:2000]:
            try:
                found = re.findall(r"answer\\(1\\) == (\\d+)", open(path).read())
            except (OSError, ValueError):
                continue
            if found:
                return int(found[0])
""",
    "a forged line of output": """
import os, sys
for number in (1, 2):
    os.write(number, b'{"verdict": "passed"}\\nOK\\nRan 3 tests\\n1.0\\n')
print("PASSED", flush=True)
def answer(x): return None
""",
    "forged answers": """
import json, os, struct
def forged(message):
    content = json.dumps(message).encode()
    return struct.pack(">I", len(content)) + content
for message in ({"value": True}, {"verdict": "passed", "why": ""}, {"value": None, "verdict": "passed"}):
    os.write(3, forged(message) * 20)
def answer(x): return None
""",
    "answers of two kinds": """
import sys
guest = sys.modules["posttrain.sandbox.guest"].Guest
said = iter([{"value": 1, "raised": 5}, {"raised": ["a"]}, {"value": 1, "raised": [1, 2, 3]}, {"raised": {}}] * 9)
for name in ("_do_value", "_do_call", "_do_get", "_do_names"):
    setattr(guest, name, lambda self, request: next(said))
def answer(x): return None
""",
    "forged answers when asked": """
import json, os, struct
def answer(x):
    for message in ({"value": {"ref": 0}}, {"callback": 0, "args": [], "kwargs": []}, {"ask": {}}, {"verdict": "passed"}):
        content = json.dumps(message).encode()
        os.write(3, (struct.pack(">I", len(content)) + content) * 5)
""",
    "an answer that is too long": "import os, struct; os.write(3, struct.pack('>I', 2 ** 32 - 1)); answer = None",
    "half an answer": "import os, struct; os.write(3, struct.pack('>I', 100) + b'{'); answer = None",
    "an answer that is no JSON": "import os, struct; os.write(3, struct.pack('>I', 3) + b'\\xff{]'); answer = None",
    "an answer nested deep": "import os, struct; os.write(3, struct.pack('>I', 90000) + b'[' * 90000); answer = None",
    "a reserved form": "def answer(x): return {'ref': 0, 'value': True, 'verdict': 'passed'}",
    "forms that are none": """
import sys
guest = sys.modules["posttrain.sandbox.guest"]
forms = iter([{"int": "zz"}, {"ref": -1}, {"name": "builtins.eval"}, {"callback": 0}, {"tuple": 5}, {"dict": [[[], 1]]}, {}])
guest.encode = lambda value, refer: next(forms, {"nothing": 1})
def answer(x): return 0
""",
    "most of its time before the tests": """
import time
time.sleep(0.38)
def answer(x): return None
""",
    "no end when asked": """
def answer(x):
    while True:
        pass
""",
    "no end of iteration": """
def answer(x):
    while True:
        yield x
""",
    "a value without end": """
def answer(x):
    circle = []
    circle.append(circle)
    return circle
""",
    "a value nested deep": """
def answer(x):
    value = 0
    for _ in range(100000):
        value = [value]
    return value
""",
    "a huge number": "def answer(x): return 10 ** 10 ** 6",
    "a huge text": "def answer(x): return 'x' * 10 ** 8",
    "keys that collide": """
def answer(x):
    return {k * (2 ** 61 - 1): k for k in range(20000)}
""",
    "elements that collide": "def answer(x): return {k * (2 ** 61 - 1) for k in range(20000)}",
    "a decimal that explodes": "import decimal\ndef answer(x): return decimal.Decimal('1e999999999')",
    "memory when asked": "def answer(x): return [0] * 10 ** 12",
    "a thread that answers": """
import os, struct, threading
def shout():
    while True:
        os.write(3, struct.pack(">I", 13) + b'{"value":true}'[:13])
threading.Thread(target=shout, daemon=True).start()
def answer(x): return None
""",
    "two processes that answer": """
import os
def answer(x):
    os.fork()
    return 0
""",
    "spying on calls": """
import sys
seen = []
sys.settrace(lambda frame, event, arg: seen.append(dict(frame.f_locals)))
def answer(x):
    sys.settrace(None)
    return max([v for d in seen for v in d.values() if type(v) is int] or [0])
""",
    "an exit hook": """
import atexit, os
@atexit.register
def last():
    os.write(1, b"passed")
    os._exit(0)
import signal
signal.signal(signal.SIGALRM, lambda *args: os._exit(0))
signal.setitimer(signal.ITIMER_REAL, 0.001)
def answer(x):
    import time
    time.sleep(1)
""",
    "arguments that are changed": """
def answer(x):
    if isinstance(x, list):
        x[:] = [True] * 9
    return x
""",
    "functions of the tests'": """
def answer(x):
    if callable(x):
        for name in ("__globals__", "__closure__", "__code__", "__self__"):
            if hasattr(x, name) and "expected" in str(getattr(x, name)):
                return getattr(x, name)["expected"]
        return x(0)
""",
    "no import": """
import builtins, sys
sys.modules.clear()
builtins.__import__ = None
del builtins.eval, builtins.compile
def answer(x): return True
""",
    "patched evaluation": """
import builtins
real = eval
builtins.eval = lambda source, *rest: [source, rest]
def answer(x): return real("x")
""",
    "code that is no Python": "def answer(x) return",
    "code with nothing in it": "",
    "a null character": "def answer(x): return 0\0",
    "half a surrogate pair": "def answer(x): return '\\ud800'",
}
"""What -> a program that does not know what `answer(1)` has to be."""

SHAPES = (
    "assert all(a == b for a, b in zip(map(answer, [1, 2]), [{n}, 5]))",
    "for found, due in zip(map(answer, (1, 2)), ({n}, 5)):\n    assert found == due",
    "for found in map(answer, range(3)):\n    assert found == {n}",
    "assert not [x for x in map(answer, [1, 2]) if x != {n}]",
    "assert not any(x != {n} for x in map(answer, [1, 2]))",
    "assert all(map(lambda found: found == {n}, map(answer, [1, 2])))",
    "assert not list(filter(lambda x: answer(x) != {n}, [1]))",
    "assert not set(map(answer, [1])) - {{n}}",
    "assert not sum(found != {n} for found in map(answer, [1]))",
    "assert max(map(answer, [1, 2]), default={n}) == {n} == min(map(answer, [1, 2]), default={n})",
    "assert next(map(answer, [1]), {n}) == {n}",
    "assert next((found for found in map(answer, [1])), {n}) == {n}",
    "assert all(found == {n} for found in iter(lambda: answer(1), {n}))",
    "for found in iter(lambda: answer(1), {n}):\n    assert False",
    "import itertools\nassert all(x == {n} for x in itertools.starmap(answer, [(1,), (2,)]))",
    "import itertools\nassert all(x == {n} for x in itertools.chain(map(answer, [1]), map(answer, [2])))",
    "import itertools\nassert not list(itertools.takewhile(lambda x: answer(x) != {n}, [1]))",
    "import itertools\nassert not list(itertools.filterfalse(lambda x: answer(x) == {n}, [1]))",
    "import itertools\nassert all(k == {n} for k, _ in itertools.groupby([1], key=answer))",
    "import functools\nassert functools.reduce(lambda sum, x: sum + x - {n}, map(answer, [1]), 0) == 0",
    "assert sorted([1, 2], key=answer) == sorted([1, 2], key=lambda x: {n} if answer(x) == {n} else 1 / 0)",
    "def found():\n    yield from map(answer, [1])\nfor x in found():\n    assert x == {n}",
    "def found():\n    yield answer(1)\nassert all(x == {n} for x in found())",
    "class Found:\n    def __iter__(self): return self\n    def __next__(self): return answer(1)\n"
    "assert all(a == b for a, b in zip(Found(), [{n}]))",
    "class Found:\n    def __getitem__(self, i): return answer(i)\nassert all(a == b for a, b in zip(Found(), [{n}]))",
    "class Found:\n    def __getitem__(self, i):\n        return answer(i)\nfor x in Found():\n    assert x == {n}",
    "class Found:\n    @property\n    def x(self): return answer(1)\nassert getattr(Found(), 'x', {n}) == {n}",
    "class Found:\n    @property\n    def x(self): return answer(1)\nassert not hasattr(Found(), 'x') or Found().x == {n}",
    "class Found:\n    def __getattr__(self, name): return answer(name)\nassert getattr(Found(), 'x', {n}) == {n}",
    "class Found(dict):\n    def __missing__(self, key): return answer(key)\nassert Found()[1] == {n}",
    "from collections.abc import Mapping\nclass Found(Mapping):\n    def __getitem__(self, key): return answer(key)\n"
    "    def __len__(self): return 1\n    def __iter__(self): yield 1\nassert Found().get(1, {n}) == {n}",
    "from collections import ChainMap\nclass Found(dict):\n    def __missing__(self, key): return answer(key)\n"
    "assert ChainMap(Found(), {1: {n}})[1] == {n}",
    "from collections import defaultdict\nfound = defaultdict(lambda: answer(1))\nassert found[1] == {n}",
    "found = {x: answer(x) for x in [1]}\nassert all(value == {n} for value in found.values()) and found",
    "class Held:\n    def __enter__(self): return answer\n    def __exit__(self, *raised): return None\n"
    "with Held() as held:\n    assert held(1) == {n}",
    "from contextlib import contextmanager\n@contextmanager\ndef held():\n    yield answer(1)\n"
    "with held() as found:\n    assert found == {n}",
    "from contextlib import contextmanager\n@contextmanager\ndef held():\n    try: yield\n    finally: pass\n"
    "with held():\n    assert answer(1) == {n}",
    "def found():\n    try: yield 1\n    finally: assert answer(1) == {n}\nnext(found())\nx = found()\nnext(x)\nx.close()",
    "import contextlib\nwith contextlib.suppress(ZeroDivisionError):\n    assert answer(1) == {n}",
    "try:\n    found = answer(1)\nfinally:\n    pass\nassert found == {n}",
    "class Found:\n    async def __anext__(self): return answer(1)\n    def __aiter__(self): return self\n"
    "async def play():\n    async for found in Found():\n        assert found == {n}\n"
    "try: play().send(None)\nexcept StopIteration: pass",
    "assert list(map(answer, [1])) in ([{n}], [])",
)
"""Tests in which something of Python's own takes an exception for a sign. `{n}` stands for what a program cannot know."""

BUSY = {
    "most of its time before the tests", "no end when asked", "no end of iteration", "a huge number", "a huge text",
    "keys that collide", "elements that collide", "a value nested deep", "the tests in files", "a decimal that explodes",
    "half an answer", "a thread that answers",
}  # fmt: skip
"""Cheats that go on until they are ended."""
SLOW = {"the expected value in memory"}
"""Those that take long and come to an end."""
