"""The sandbox: runs programs that a model wrote, and contains them. ctypes and Linux, no torch, nothing to install.

host          the caller's side: a warm interpreter, and requests for jails;   shared_sandbox  one per process
program       the caller's end of one program;   session  an interpreter as a tool
fork_server   the warm interpreter: starts and ends programs;   capabilities  protections that this system supports
jail          rights that a fork drops before it runs a program, by seccomp, landlock, filesystem, syscalls, limits
guest         answers requests in a jail;   examiner  runs tests in another;   plain_values, json_messages  between
bubblewrap    programs that are not Python;   containers  commands in containers of Docker or Podman
bubblewrap_container  the same in jails, for   plain_images  whose programs this machine has
remote        the same in sandboxes of services;   container_choice  which of these
"""
