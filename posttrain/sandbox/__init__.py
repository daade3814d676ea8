"""The sandbox: programs that a model wrote run here, and cannot escape. ctypes and Linux, no torch, nothing to install.

host      the caller's side: a warm interpreter, and who asks it for jails;   shared  one for each process
program   the caller's end of one program;   session  an interpreter as a tool
warm      the warm interpreter: starts programs and ends them;   ground  what this system allows, and where they run
jail      what a fork gives up before it is a program;   seccomp, landlock, files, kernel, limits  with what
guest     what answers in a jail;   examiner  what plays tests in another;   plain, talk  values and messages between
bubblewrap  other programs than Python
"""
