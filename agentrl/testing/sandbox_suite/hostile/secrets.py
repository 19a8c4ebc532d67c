"""Programs that look for secrets of the host and of other episodes, and for a way out by the network."""

from __future__ import annotations

from agentrl.testing.sandbox_suite.hostile.program import program

SECRETS = [
    program("env_secret", "environment", """
        for name, value in os.environ.items():
            if order["secret"] in value:
                escaped(name)
    """),
    program("proc_environ_host", "processes", """
        for pid in (order["victim"], order["harness"]):
            attempt(lambda: contains_secret("/proc/%d/environ" % pid))
    """, escapes_outside=True),
    program("proc_environ_all", "processes", """
        for pid in [p for p in os.listdir("/proc") if p.isdigit()] if os.path.exists("/proc/self") else []:
            if int(pid) != os.getpid():
                try:
                    contains_secret("/proc/%s/environ" % pid)
                    escaped(pid)
                except (OSError, ValueError):
                    pass
    """, escapes_outside=True),
    program("see_host_procs", "processes", """
        def look():
            with open("/proc/%d/cmdline" % order["victim"], "rb") as f:
                if b"sleep\\x001000" not in f.read():
                    raise ValueError("somebody else")
        attempt(look)
    """, escapes_outside=True),
    program("inherited_fd", None, """
        for fd in range(3, 4096):
            try:
                os.fstat(fd)
            except OSError:
                continue
            escaped(fd)
    """),
    program("sysv_shm", "processes", """
        identifier = libc.shmget(order["shm_key"], 4096, 0o666)
        escaped(identifier) if identifier >= 0 else print("stopped")
    """, escapes_outside=True),
    program("dmesg", "privileges", """
        buffer = ctypes.create_string_buffer(4096)
        escaped() if libc.klogctl(3, buffer, 4096) > 0 else print("stopped")
        attempt(lambda: os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK))
    """),
]  # fmt: skip

NETWORK = [
    program("net_loopback", "network", 'attempt(lambda: connect(socket.AF_INET, ("127.0.0.1", order["port"])))',
       escapes_outside=True),
    program("net_outside", "network", """
        def udp():
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
                s.connect(("192.0.2.1", 53))
        attempt(udp)
        def tcp():
            with socket.socket(socket.AF_INET) as s:
                s.setblocking(False)
                code = s.connect_ex(("192.0.2.1", 80))
                if code not in (0, errno.EINPROGRESS):
                    raise OSError(code, os.strerror(code))
        attempt(tcp)
    """),
    program("net_raw", "network", """
        attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
        attempt(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 768))
    """),
    program("net_vsock", "network", "attempt(lambda: socket.socket(40, socket.SOCK_STREAM))"),
    program("unix_socket", "network", 'attempt(lambda: connect(socket.AF_UNIX, order["unix"]))',
       escapes_outside=True),
    program("abstract_socket", "network", 'attempt(lambda: connect(socket.AF_UNIX, "\\0" + order["abstract"]))',
       escapes_outside=True),
    program("docker_socket", "network", """
        for path in ("/var/run/docker.sock", "/run/docker.sock", "/run/containerd/containerd.sock"):
            attempt(lambda: connect(socket.AF_UNIX, path))
    """),
]  # fmt: skip
