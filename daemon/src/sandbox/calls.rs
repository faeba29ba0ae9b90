//! The system calls of a running daemon. Others are refused as if the kernel did not have them, and
//! counted: if a guest finds a way to one of them, the network of all others must go on. Four
//! calls, which only an intruder makes who has taken the daemon over, end it.

use std::collections::BTreeSet;

use nix::libc;
use seccompiler::SeccompCmpOp::{Eq, MaskedEq};
use seccompiler::{
    BpfProgram, Error, SeccompAction, SeccompCmpArgLen, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, apply_filter_all_threads,
};

use crate::errors::{StartError, error};
use crate::owners::Access;
use crate::sys;

/// With any arguments.
const CALLS: &[libc::c_long] = &[
    // Events, time, chance.
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_ctl,
    libc::SYS_eventfd2, // of an overlay that comes
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_timerfd_settime,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_restart_syscall,
    libc::SYS_getrandom,
    // Descriptors and files.
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_lseek,
    libc::SYS_pread64, // counters of attached taps
    libc::SYS_close,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_getdents64, // of conf.d
    libc::SYS_unlink,
    libc::SYS_rename, // of the arena, at the end
    libc::SYS_mkdir,
    libc::SYS_flock, // whose file is closed
    libc::SYS_fallocate,
    libc::SYS_ftruncate,
    libc::SYS_memfd_create,
    // Sockets that there are; those of VMs that come.
    libc::SYS_accept4,
    libc::SYS_bind,
    libc::SYS_listen,
    libc::SYS_connect,
    libc::SYS_getsockname,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_shutdown,
    // Memory; see `rules`.
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_brk,
    // Threads and their signals.
    libc::SYS_clone3, // see `old_clone`
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_futex,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_getrusage,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_sigaltstack,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// `FIONBIO`, which is std's, and `SIOCGIFINDEX`.
const IOCTLS: [u32; 3] = [0x5421, 0x8933, 0x8004_54d2];

/// Operations on descriptors. Not F_SETOWN and F_SETSIG, which send any signal to any process.
const COMMANDS: [libc::c_int; 8] = [
    libc::F_DUPFD_CLOEXEC,
    libc::F_GETFD, // std's debug assertion
    libc::F_SETFD,
    libc::F_GETFL,
    libc::F_SETFL,
    libc::F_ADD_SEALS,
    libc::F_GET_SEALS,
    libc::F_OFD_GETLK, // whether a daemon waits for the arena
];

/// Levels and names of the options that overlays and `closer` set (socket(7), udp(7), ip(7),
/// ipv6(7)). Others make packet filters, attach programs, or speak for addresses of others.
const SET_OPTIONS: [(libc::c_int, libc::c_int); 9] = [
    (libc::SOL_SOCKET, libc::SO_LINGER),
    (libc::SOL_SOCKET, libc::SO_RCVBUF),
    (libc::SOL_SOCKET, libc::SO_SNDBUF),
    (libc::SOL_UDP, libc::UDP_GRO),
    (libc::SOL_UDP, libc::UDP_NO_CHECK6_RX),
    (libc::IPPROTO_IP, libc::IP_RECVTOS),
    (libc::IPPROTO_IP, libc::IP_MTU_DISCOVER),
    (libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS),
    (libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER),
];

/// Further calls of UCX, with any arguments.
const UCX_CALLS: [libc::c_long; 3] =
    [libc::SYS_getpeername, libc::SYS_accept, libc::SYS_timerfd_create];

/// `SIOCGIFMTU`, `SIOCGIFHWADDR` and `SIOCETHTOOL` (netdevice(7)), of interfaces; the commands of
/// RDMA's adapters (`RDMA_VERBS_IOCTL`, rdma/rdma_user_ioctl_cmds.h).
const UCX_IOCTLS: [u32; 4] = [0x8921, 0x8927, 0x8946, 0xc018_1b01];

/// Options that UCX sets at its sockets (tcp(7)).
const UCX_OPTIONS: [(libc::c_int, libc::c_int); 8] = [
    (libc::SOL_SOCKET, libc::SO_REUSEADDR),
    (libc::SOL_SOCKET, libc::SO_KEEPALIVE),
    (libc::IPPROTO_TCP, libc::TCP_NODELAY),
    (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE),
    (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL),
    (libc::IPPROTO_TCP, libc::TCP_KEEPCNT),
    (libc::IPPROTO_TCP, libc::TCP_SYNCNT),
    (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT),
];

/// Options that are read: a socket's peer, a path's MTU.
const GET_OPTIONS: [(libc::c_int, libc::c_int); 4] = [
    (libc::SOL_SOCKET, libc::SO_ERROR),
    (libc::SOL_SOCKET, libc::SO_PEERCRED),
    (libc::IPPROTO_IP, libc::IP_MTU),
    (libc::IPPROTO_IPV6, libc::IPV6_MTU),
];

/// Only an intruder makes them.
const DEADLY: [libc::c_long; 4] =
    [libc::SYS_execve, libc::SYS_execveat, libc::SYS_ptrace, libc::SYS_process_vm_writev];

/// From now on all threads make no other calls.
pub(super) fn restrict(
    owners: impl Iterator<Item = Access>,
    has_ucx: bool,
) -> Result<(), StartError> {
    sys::handle_refused_calls().map_err(|e| refuse(&e))?;
    // The last forbids to restrict more.
    apply([deadly(), old_clone(), allowed(owners, has_ucx)])
}

/// Programs for all threads, one after the other.
pub(crate) fn apply(programs: impl IntoIterator<Item = Built>) -> Result<(), StartError> {
    let mut programs = programs.into_iter();
    programs
        .try_for_each(|it| it.map_err(Error::from).and_then(|it| apply_filter_all_threads(&it)))
        .map_err(|e| refuse(&e))
}

fn refuse(e: &dyn std::fmt::Display) -> StartError {
    let fix = "run a kernel with CONFIG_SECCOMP_FILTER";
    error(format!("cannot restrict system calls (seccomp): {e}"), fix)
}

pub(crate) type Built = Result<BpfProgram, seccompiler::BackendError>;

fn allowed(owners: impl Iterator<Item = Access>, has_ucx: bool) -> Built {
    let mut rules: Vec<_> = CALLS.iter().map(|&call| (call, Vec::new())).collect();
    rules.extend(with_arguments(owners)?);
    if has_ucx {
        rules.extend(UCX_CALLS.map(|call| (call, Vec::new())));
        for (call, more) in of_ucx()? {
            let known = rules.iter_mut().find(|(known, _)| *known == call);
            known.expect("some of them are allowed").1.extend(more);
        }
    }
    build(rules, SeccompAction::Trap, SeccompAction::Allow)
}

fn deadly() -> Built {
    let rules = DEADLY.map(|call| (call, Vec::new())).into();
    build(rules, SeccompAction::Allow, SeccompAction::KillProcess)
}

/// The flags of clone3 are in memory, which no filter sees: libraries take it for an old kernel's
/// and go on to clone. They do so with all signals blocked, so this is no matter for the handler.
fn old_clone() -> Built {
    let refuse = SeccompAction::Errno(libc::ENOSYS.cast_unsigned());
    build(vec![(libc::SYS_clone3, Vec::new())], SeccompAction::Allow, refuse)
}

pub(crate) fn build(
    rules: Vec<(libc::c_long, Vec<SeccompRule>)>,
    other: SeccompAction,
    these: SeccompAction,
) -> Built {
    let rules = rules.into_iter().collect();
    SeccompFilter::new(rules, other, these, TargetArch::x86_64)?.try_into()
}

/// Of calls of which only some are needed, those that UCX makes: TCP streams.
fn of_ucx() -> Result<Vec<(libc::c_long, Vec<SeccompRule>)>, seccompiler::BackendError> {
    let compare = |at, operator, value: libc::c_int| {
        let value = u64::from(value.cast_unsigned());
        SeccompCondition::new(at, SeccompCmpArgLen::Dword, operator, value)
    };
    let streams = |family| {
        let kind = compare(1, MaskedEq(0xf), libc::SOCK_STREAM)?;
        SeccompRule::new(vec![compare(0, Eq, family)?, kind, compare(2, Eq, 0)?])
    };
    let option = |&(level, name): &(libc::c_int, libc::c_int)| {
        SeccompRule::new(vec![compare(1, Eq, level)?, compare(2, Eq, name)?])
    };
    let command = |&it: &u32| SeccompRule::new(vec![compare(1, Eq, it.cast_signed())?]);
    let commands = UCX_IOCTLS.iter().map(command).collect::<Result<_, _>>()?;
    let options = UCX_OPTIONS.iter().map(option).collect::<Result<_, _>>()?;
    Ok(vec![
        (libc::SYS_socket, vec![streams(libc::AF_INET)?, streams(libc::AF_INET6)?]),
        (libc::SYS_setsockopt, options),
        (libc::SYS_ioctl, commands),
    ])
}

/// Calls of which only some are needed.
fn with_arguments(
    owners: impl Iterator<Item = Access>,
) -> Result<Vec<(libc::c_long, Vec<SeccompRule>)>, seccompiler::BackendError> {
    let compare = |at, operator, value: u32| {
        SeccompCondition::new(at, SeccompCmpArgLen::Dword, operator, value.into())
    };
    let is = |at, value| SeccompRule::new(vec![compare(at, Eq, value)?]);
    let number = |constant: libc::c_int| constant.cast_unsigned();
    let exec = MaskedEq(number(libc::PROT_EXEC).into());
    let no_code = || SeccompRule::new(vec![compare(2, exec.clone(), 0)?]);
    let thread = number(libc::CLONE_THREAD);
    let new = libc::CLONE_NEWUSER | libc::CLONE_NEWNS | libc::CLONE_NEWNET | libc::CLONE_NEWPID;
    let new = new | libc::CLONE_NEWUTS | libc::CLONE_NEWIPC | libc::CLONE_NEWCGROUP;
    let is_thread = compare(0, MaskedEq((thread | number(new)).into()), thread)?;
    let ioctls = IOCTLS.iter().map(|&request| is(1, request));
    let commands = COMMANDS.iter().map(|&command| is(1, number(command)));
    // For VMs that come, and to ask for interfaces; for overlays that come: datagrams. No other
    // sockets of a network, no netlink.
    let datagrams = |family| {
        let kind = compare(1, MaskedEq(0xf), number(libc::SOCK_DGRAM))?;
        // UDP: not ICMP, and no protocol whose module the kernel would load.
        let protocol = compare(2, Eq, 0)?;
        SeccompRule::new(vec![compare(0, Eq, number(family))?, kind, protocol])
    };
    let sockets =
        vec![is(0, number(libc::AF_UNIX))?, datagrams(libc::AF_INET)?, datagrams(libc::AF_INET6)?];
    let option = |&(level, name): &(libc::c_int, libc::c_int)| {
        SeccompRule::new(vec![compare(1, Eq, number(level))?, compare(2, Eq, number(name))?])
    };
    let none_of = |at, bits| SeccompRule::new(vec![compare(at, MaskedEq(bits), 0)?]);
    // It would connect, which Landlock does not see.
    let fast_open = u64::from(number(libc::MSG_FASTOPEN));
    let new_file = number(libc::O_CREAT) | (number(libc::O_TMPFILE) & !number(libc::O_DIRECTORY));
    let mut rules = vec![
        // Files there are: the configuration, MTUs.
        (libc::SYS_openat, vec![none_of(2, new_file.into())?]),
        (libc::SYS_sendto, vec![none_of(3, fast_open)?]),
        (libc::SYS_sendmsg, vec![none_of(2, fast_open)?]),
        (libc::SYS_mmap, vec![no_code()?]),
        (libc::SYS_mprotect, vec![no_code()?]),
        (libc::SYS_clone, vec![SeccompRule::new(vec![is_thread])?]),
        // To its own threads: the watchdog's, and that of abort(3).
        (libc::SYS_tgkill, vec![is(0, std::process::id())?]),
        (libc::SYS_fcntl, commands.collect::<Result<_, _>>()?),
        (libc::SYS_ioctl, ioctls.collect::<Result<_, _>>()?),
        (libc::SYS_socket, sockets),
        (libc::SYS_socketpair, vec![is(0, number(libc::AF_UNIX))?]), // `vhost::locker`
        (libc::SYS_setsockopt, SET_OPTIONS.iter().map(option).collect::<Result<_, _>>()?),
        (libc::SYS_getsockopt, GET_OPTIONS.iter().map(option).collect::<Result<_, _>>()?),
        (libc::SYS_prctl, vec![is(0, number(libc::PR_SET_NAME))?]),
    ];
    // Files are not asked about by Landlock here, so those of others are taken away at worst.
    let (mut modes, mut chowns) = (BTreeSet::new(), Vec::new());
    for Access { mode, uid, gid } in owners {
        modes.extend(mode);
        if uid.is_some() || gid.is_some() {
            let ids = [(1, uid), (2, gid)].into_iter();
            let ids = ids.map(|(at, id)| compare(at, Eq, id.unwrap_or(u32::MAX))); // chown(2): -1
            chowns.push(SeccompRule::new(ids.collect::<Result<_, _>>()?)?);
        }
    }
    if !modes.is_empty() {
        let modes = modes.into_iter().map(|mode| is(1, mode)).collect::<Result<_, _>>()?;
        rules.push((libc::SYS_chmod, modes));
    }
    if !chowns.is_empty() {
        rules.push((libc::SYS_chown, chowns));
    }
    Ok(rules)
}

#[cfg(test)]
mod tests {
    use nix::unistd::getppid;

    use super::*;

    /// The verdict of `program` on a call, by the few instructions of which seccompiler makes
    /// programs (linux/bpf_common.h, linux/seccomp.h). So an intruder's calls are tested without
    /// making them.
    fn verdict(program: &BpfProgram, call: libc::c_long, arguments: &[i64]) -> u32 {
        const X86_64: u32 = 0xc000_003e; // AUDIT_ARCH_X86_64
        let mut data = vec![u32::try_from(call).unwrap(), X86_64, 0, 0];
        for at in 0..6 {
            let value = arguments.get(at).copied().unwrap_or(0).to_le_bytes();
            let (words, _) = value.as_chunks();
            data.extend(words.iter().map(|&word| u32::from_le_bytes(word)));
        }
        let (mut at, mut a) = (0, 0);
        loop {
            let it = &program[at];
            let jump = |yes| usize::from(if yes { it.jt } else { it.jf });
            at += 1;
            match it.code {
                0x20 => a = data[it.k as usize / 4],
                0x54 => a &= it.k,
                0x05 => at += it.k as usize,
                0x15 => at += jump(a == it.k),
                0x25 => at += jump(a > it.k),
                0x35 => at += jump(a >= it.k),
                0x06 => return it.k,
                other => panic!("{other:#x}"),
            }
        }
    }

    /// Whether a daemon whose sockets are of group 107 can make this call.
    fn can(call: libc::c_long, arguments: &[i64]) -> bool {
        let access = Access { mode: Some(0o660), uid: None, gid: Some(107) };
        let programs = [
            deadly().unwrap(),
            old_clone().unwrap(),
            allowed([access].into_iter(), false).unwrap(),
        ];
        programs.iter().all(|program| verdict(program, call, arguments) == libc::SECCOMP_RET_ALLOW)
    }

    #[test]
    fn signals_go_to_threads_of_the_daemon_and_to_nobody_else() {
        let (own, other) = (i64::from(std::process::id()), i64::from(getppid().as_raw()));
        assert!(can(libc::SYS_tgkill, &[own, own, 23]));
        assert!(!can(libc::SYS_tgkill, &[other, other, 9]));
        for call in [libc::SYS_kill, libc::SYS_tkill, libc::SYS_rt_sigqueueinfo] {
            assert!(!can(call, &[other, 9]), "{call}");
        }
        // The kernel does not send them for a descriptor, either.
        assert!(can(libc::SYS_fcntl, &[3, libc::F_SETFL.into(), libc::O_NONBLOCK.into()]));
        for command in [libc::F_SETOWN, libc::F_NOTIFY, libc::F_SETLEASE, 10, 15] {
            assert!(!can(libc::SYS_fcntl, &[3, command.into(), other]), "{command}");
        }
    }

    #[test]
    fn sockets_are_set_up_as_overlays_need_it_and_not_otherwise() {
        let (unix, inet, inet6) = (libc::AF_UNIX, libc::AF_INET, libc::AF_INET6);
        let (stream, datagram) = (libc::SOCK_STREAM, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC);
        let made = |family, kind| can(libc::SYS_socket, &[i64::from(family), i64::from(kind)]);
        assert!(made(unix, stream) && made(inet, datagram) && made(inet6, datagram));
        let pair = |family| can(libc::SYS_socketpair, &[i64::from(family), stream.into()]);
        assert!(pair(unix) && !pair(inet) && !pair(libc::AF_TIPC));
        for (family, protocol) in [(inet, 1), (inet, 115), (inet, 136), (inet6, 58), (inet6, 115)] {
            let arguments = [i64::from(family), i64::from(datagram), protocol];
            assert!(!can(libc::SYS_socket, &arguments), "ICMP, L2TP, UDP-Lite: {protocol}");
        }
        assert!(!made(inet, stream) && !made(inet6, libc::SOCK_RAW) && !made(inet, libc::SOCK_RAW));
        for family in [libc::AF_PACKET, libc::AF_NETLINK, libc::AF_VSOCK, libc::AF_ALG, 44] {
            assert!(!made(family, datagram) && !made(family, libc::SOCK_RAW), "{family}");
        }
        let option = |call, level: i32, name: i32| can(call, &[3, level.into(), name.into()]);
        let (set, get) = (libc::SYS_setsockopt, libc::SYS_getsockopt);
        assert!(option(set, libc::SOL_UDP, libc::UDP_GRO));
        assert!(option(set, libc::SOL_UDP, libc::UDP_NO_CHECK6_RX));
        assert!(option(get, libc::IPPROTO_IPV6, libc::IPV6_MTU));
        // Of packet filters, set and read (linux/netfilter_ipv4/ip_tables.h and its like for IPv6).
        for name in [64, 65, 67, 68, 69] {
            for level in [libc::IPPROTO_IP, libc::IPPROTO_IPV6] {
                assert!(!option(set, level, name) && !option(get, level, name), "{level} {name}");
            }
        }
        for name in [
            libc::SO_MARK,
            libc::SO_RCVBUFFORCE,
            libc::SO_SNDBUFFORCE,
            libc::SO_BINDTODEVICE,
            libc::SO_ATTACH_FILTER,
            libc::SO_ATTACH_BPF,
            libc::SO_ATTACH_REUSEPORT_EBPF,
            libc::SO_PRIORITY,
        ] {
            assert!(!option(set, libc::SOL_SOCKET, name), "{name}");
        }
        for name in [libc::IP_TRANSPARENT, libc::IP_OPTIONS, libc::IP_ADD_MEMBERSHIP] {
            assert!(!option(set, libc::IPPROTO_IP, name), "{name}");
        }
        assert!(!option(set, libc::SOL_UDP, libc::UDP_ENCAP));
        // No connection by sending.
        for (flags, is_fine) in [(libc::MSG_NOSIGNAL, true), (libc::MSG_FASTOPEN, false)] {
            let flags = i64::from(flags | libc::MSG_DONTWAIT);
            assert_eq!(can(libc::SYS_sendto, &[3, 0, 1, flags]), is_fine);
            assert_eq!(can(libc::SYS_sendmsg, &[3, 0, flags]), is_fine);
        }
    }

    #[test]
    fn interfaces_files_memory_and_threads_are_those_of_a_daemon() {
        let request = |request: i64| can(libc::SYS_ioctl, &[3, request]);
        assert!(request(0x5421) && request(0x8933) && request(0x8004_54d2));
        // SIOCSIFFLAGS, SIOCSIFADDR, SIOCADDRT, SIOCSIFNETMASK, SIOCBRADDIF, SIOCBRDELIF,
        // SIOCSIFNAME; TUNSETIFF, TUNSETOWNER, TUNSETQUEUE; TIOCSTI.
        for other in [0x8914, 0x8916, 0x890b, 0x891c, 0x89a2, 0x89a3, 0x8923] {
            assert!(!request(other), "{other:#x}");
        }
        for other in [0x4004_54ca, 0x4004_54cc, 0x4004_54d9, 0x5412] {
            assert!(!request(other), "{other:#x}");
        }
        let opened = |flags: i32| can(libc::SYS_openat, &[-100, 1, (libc::O_RDWR | flags).into()]);
        assert!(opened(libc::O_CLOEXEC) && opened(libc::O_DIRECTORY));
        assert!(!opened(libc::O_CREAT) && !opened(libc::O_TMPFILE));
        assert!(can(libc::SYS_chmod, &[1, 0o660]) && !can(libc::SYS_chmod, &[1, 0o4777]));
        assert!(can(libc::SYS_chown, &[1, -1, 107]));
        assert!(!can(libc::SYS_chown, &[1, -1, 0]) && !can(libc::SYS_chown, &[1, 0, 107]));
        let executable = i64::from(libc::PROT_READ | libc::PROT_EXEC);
        for call in [libc::SYS_mmap, libc::SYS_mprotect] {
            assert!(can(call, &[0, 4096, libc::PROT_WRITE.into()]));
            assert!(!can(call, &[0, 4096, executable]));
        }
        let thread = libc::CLONE_VM | libc::CLONE_FILES | libc::CLONE_SIGHAND | libc::CLONE_THREAD;
        assert!(can(libc::SYS_clone, &[thread.into()]));
        assert!(!can(libc::SYS_clone, &[libc::SIGCHLD.into()]));
        assert!(!can(libc::SYS_clone, &[(thread | libc::CLONE_NEWUSER).into()]));
        for call in [
            libc::SYS_fork,
            libc::SYS_execve,
            libc::SYS_bpf,
            libc::SYS_io_uring_setup,
            libc::SYS_userfaultfd,
            libc::SYS_keyctl,
            libc::SYS_process_vm_readv,
            libc::SYS_open_by_handle_at,
            libc::SYS_perf_event_open,
        ] {
            assert!(!can(call, &[]), "{call}");
        }
    }

    #[test]
    fn calls_of_other_architectures_end_the_process() {
        let mut program = allowed(std::iter::empty(), false).unwrap();
        // As a call of i386 would be: the first comparison is with its architecture.
        program[1].k = 0x4000_0003;
        assert_eq!(verdict(&program, libc::SYS_read, &[]), libc::SECCOMP_RET_KILL_PROCESS);
        // Those of x32 are other numbers.
        assert!(!can(libc::SYS_read | 0x4000_0000, &[]));
    }
}
