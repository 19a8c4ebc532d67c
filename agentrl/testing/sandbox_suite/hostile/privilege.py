"""Programs that want rights they do not have."""

from __future__ import annotations

from agentrl.testing.sandbox_suite.hostile.program import program

PRIVILEGE = [
    program("set_time", "privileges", """
        attempt(lambda: time.clock_settime(time.CLOCK_REALTIME, time.time()))
    """),
    program("mount", "privileges", """
        os.makedirs("m", exist_ok=True)
        escaped() if libc.mount(b"x", b"m", b"tmpfs", 0, None) == 0 else print("stopped")
        escaped("remount") if libc.mount(b"x", b"/", None, 32, None) == 0 else print("stopped")
    """),
    program("mknod_disk", "privileges", """
        import stat
        attempt(lambda: os.mknod("disk", 0o666 | stat.S_IFBLK, os.makedev(254, 0)))
        attempt(lambda: os.mknod("memory", 0o666 | stat.S_IFCHR, os.makedev(1, 1)))
    """),
    program("setuid", "privileges", """
        escaped("uid 0") if 0 in os.getresuid() else None
        attempt(lambda: os.setuid(0))
        attempt(lambda: os.setresuid(0, 0, 0))
        attempt(lambda: os.setgroups([0]))
    """),
    program("setuid_binary", "privileges", """
        libc.prctl.restype = ctypes.c_int
        escaped("no_new_privs is off") if libc.prctl(39, 0, 0, 0, 0) != 1 else print("stopped")
        for path in ("/bin/su", "/usr/bin/passwd", "/usr/bin/mount", "/usr/bin/newgrp"):
            if os.path.exists(path) and os.stat(path).st_mode & 0o4000 and not os.statvfs(path).f_flag & 2:
                print("a set-uid program is there, without effect:", path)
    """),
    program("capabilities", "privileges", """
        class Header(ctypes.Structure):
            _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]
        data = (ctypes.c_uint32 * 6)()
        libc.capget(ctypes.byref(Header(0x20080522, 0)), data)
        escaped(list(data)) if any(data) else print("none")
        bounding = [cap for cap in range(41) if libc.prctl(23, cap, 0, 0, 0) == 1]
        if bounding and libc.prctl(39, 0, 0, 0, 0) != 1:  # without effect under no_new_privs
            escaped(bounding)
    """),
    program("userns_caps", "syscalls", """
        escaped("unshare") if libc.unshare(0x10000000) == 0 else print("stopped")
        escaped("unshare mount") if libc.unshare(0x00020000) == 0 else print("stopped")
        result, code = syscall(56, 220, 0x10000000 | 17, 0, 0, 0, 0)
        if result == 0:
            os._exit(0)
        escaped("clone") if result > 0 else print("stopped:", os.strerror(code))
        escaped("setns") if libc.setns(0, 0) == 0 else print("stopped")
    """),
    program("kernel_surface", "syscalls", """
        calls = {"bpf": (321, 280), "perf_event_open": (298, 241), "io_uring_setup": (425, 425),
                 "userfaultfd": (323, 282), "keyctl": (250, 219), "add_key": (248, 217), "kexec_load": (246, 104),
                 "init_module": (175, 105), "open_by_handle_at": (304, 265), "fanotify_init": (300, 262),
                 "move_mount": (429, 429), "fsopen": (430, 430), "pidfd_getfd": (438, 438), "swapon": (167, 224),
                 "reboot": (169, 142), "acct": (163, 89), "sethostname": (170, 161),
                 "io_setup": (206, 0)}  # whose contexts are counted for the whole machine
        for name, (x86, arm) in calls.items():
            result, code = syscall(x86, arm, 0, 0, 0, 0, 0, 0)
            if result >= 0 or code not in (errno.EPERM, errno.ENOSYS):
                escaped("%s: %d %s" % (name, result, errno.errorcode.get(code)))
    """),
    program("mount_propagation", "privileges", """
        for flags in (1 << 20, 1 << 19, 1 << 18, 1 << 17, 4096):  # shared, slave, private, unbindable, bind
            for place in (b"/", b".", b"/proc"):
                done = libc.mount(place, place, None, flags | 16384, None)
                escaped((place, flags)) if done == 0 else print("stopped:", os.strerror(ctypes.get_errno()))
        tree, code = syscall(428, 428, -100, ctypes.addressof(ctypes.create_string_buffer(b"/")), 1) 
        escaped("open_tree") if tree >= 0 else print("stopped:", os.strerror(code))
        escaped("umount") if libc.umount2(b"/proc", 2) == 0 else print("stopped:", os.strerror(ctypes.get_errno()))
        for name in ("fuse", "userfaultfd", "cuse"):
            attempt(lambda: os.open("/dev/" + name, os.O_RDWR))
    """),
    program("x32_table", "syscalls", """
        if not ARM:
            result, code = syscall(0x40000000 + 39, 0)
            escaped() if result > 0 else print("stopped:", os.strerror(code))
    """),
    program("proc_sys_write", "privileges", """
        for name in ("kernel/core_pattern", "kernel/hostname", "vm/drop_caches", "kernel/modprobe"):
            attempt(lambda: open("/proc/sys/" + name, "w").write("3"))
        attempt(lambda: open("/proc/sysrq-trigger", "w").write("h"))
    """),
    program("tty_inject", None, """
        import fcntl
        for path in ("/dev/tty", "/dev/console", "/dev/pts/0"):
            attempt(lambda: fcntl.ioctl(os.open(path, os.O_RDWR), 0x5412, b"x"))
        attempt(lambda: fcntl.ioctl(0, 0x5412, b"x"))
    """),
    program("devices", "privileges", """
        for name in ("mem", "kmem", "port", "vda", "sda", "kvm", "fuse", "loop-control", "mapper/control"):
            attempt(lambda: os.open("/dev/" + name, os.O_RDWR))
    """),
]  # fmt: skip
