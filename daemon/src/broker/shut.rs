//! The sandbox of the broker, the connector and the dialer: they give away every right that their
//! work does not need.

use std::net::SocketAddr;
use std::path::Path;

use landlock::AccessNet;
use nix::libc;
use rustix::thread::CapabilitySet;
use seccompiler::SeccompCmpOp::{Eq, MaskedEq};
use seccompiler::{
    BackendError, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompRule,
};

use crate::errors::StartError;
use crate::sandbox::calls::{Built, apply, build};
use crate::sandbox::{files, privileges};

/// With any arguments: for messages to and from the daemon, memory, the text of a panic, and the
/// end.
const CALLS: &[libc::c_long] = &[
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_close,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_brk,
    libc::SYS_futex,
    libc::SYS_getrandom,
    libc::SYS_write,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_exit_group,
];

/// To read the configuration and to open devices; to see who owns a socket.
const CALLS_OF_BROKER: &[libc::c_long] = &[
    libc::SYS_read,
    libc::SYS_lseek,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_getdents64, // of conf.d
    libc::SYS_getsockname,
];

/// linux/sockios.h, linux/if_tun.h.
const IOCTLS: [u32; 9] = [
    0x8913,      // SIOCGIFFLAGS
    0x8914,      // SIOCSIFFLAGS
    0x8924,      // SIOCSIFHWADDR
    0x8933,      // SIOCGIFINDEX
    0x89a2,      // SIOCBRADDIF
    0x4004_54ca, // TUNSETIFF
    0x4004_54d0, // TUNSETOFFLOAD
    0x4004_54d8, // TUNSETVNETHDRSZ
    0x4004_54dc, // TUNSETVNETLE
];

/// Gives all else away, in the broker. `path` is the configuration's.
///
/// # Errors
/// What the system refuses.
pub fn shut(path: &Path, has_macvtap: bool) -> Result<(), StartError> {
    privileges::keep(CapabilitySet::NET_ADMIN | CapabilitySet::BPF)?;
    // The daemon reports the consequences of a kernel without it.
    files::restrict(files::of_broker(path, has_macvtap), Some(&[]))?;
    apply([of_broker()])
}

/// Any other call ends the process.
fn of_broker() -> Built {
    let new_file = libc::O_CREAT | (libc::O_TMPFILE & !libc::O_DIRECTORY);
    let force = |name| rule(&[(1, libc::SOL_SOCKET), (2, name)]);
    let mut rules = common()?;
    rules.extend(CALLS_OF_BROKER.iter().map(|&call| (call, Vec::new())));
    rules.extend([
        (libc::SYS_openat, vec![none_of(2, new_file)?]),
        (libc::SYS_ioctl, IOCTLS.iter().map(|&it| is(1, it)).collect::<Result<_, _>>()?),
        // To ask for interfaces and set them up.
        (libc::SYS_socket, vec![rule(&[(0, libc::AF_UNIX)])?]),
        (libc::SYS_setsockopt, vec![force(libc::SO_RCVBUFFORCE)?, force(libc::SO_SNDBUFFORCE)?]),
        // Claims on taps that are attached; Landlock forbids names of files.
        (libc::SYS_bind, Vec::new()),
        // A map, programs and their links, for those.
        (libc::SYS_bpf, [0, 5, 28].iter().map(|&it| is(0, it)).collect::<Result<_, _>>()?),
        // Copies of its own descriptors.
        (libc::SYS_fcntl, vec![rule(&[(1, libc::F_GETFD)])?, rule(&[(1, libc::F_DUPFD_CLOEXEC)])?]),
    ]);
    build(rules, SeccompAction::KillProcess, SeccompAction::Allow)
}

/// To make connections.
const CALLS_OF_CONNECTOR: &[libc::c_long] =
    &[libc::SYS_connect, libc::SYS_poll, libc::SYS_ppoll, libc::SYS_clock_gettime];

/// Of connections (socket(7), tcp(7)).
const OPTIONS: [(libc::c_int, libc::c_int); 5] = [
    (libc::SOL_SOCKET, libc::SO_KEEPALIVE),
    (libc::IPPROTO_TCP, libc::TCP_NODELAY),
    (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE),
    (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL),
    (libc::IPPROTO_TCP, libc::TCP_KEEPCNT),
];

/// Likewise, in the process that connects to these.
///
/// # Errors
/// What the system refuses.
pub fn shut_connector(members: &[SocketAddr]) -> Result<(), StartError> {
    privileges::keep(CapabilitySet::empty())?;
    let ports: Vec<_> =
        members.iter().map(|member| (member.port(), AccessNet::ConnectTcp)).collect();
    files::restrict(Vec::new(), Some(&ports))?;
    apply([of_connector()])
}

/// Any other call ends the process.
fn of_connector() -> Built {
    let stream = |family: libc::c_int| {
        let kind = compare(1, MaskedEq(0xf), libc::SOCK_STREAM.cast_unsigned())?;
        let family = compare(0, Eq, family.cast_unsigned())?;
        SeccompRule::new(vec![family, kind, compare(2, Eq, 0)?])
    };
    let options = OPTIONS.map(|(level, name)| rule(&[(1, level), (2, name)]));
    let mut rules = common()?;
    rules.extend(CALLS_OF_CONNECTOR.iter().map(|&call| (call, Vec::new())));
    rules.extend([
        (libc::SYS_socket, vec![stream(libc::AF_INET)?, stream(libc::AF_INET6)?]),
        (libc::SYS_setsockopt, options.into_iter().collect::<Result<_, _>>()?),
        (libc::SYS_getsockopt, vec![rule(&[(1, libc::SOL_SOCKET), (2, libc::SO_ERROR)])?]),
        (libc::SYS_ioctl, vec![is(1, 0x5421)?]), // FIONBIO
    ]);
    build(rules, SeccompAction::KillProcess, SeccompAction::Allow)
}

/// To begin connections.
const CALLS_OF_DIALER: &[libc::c_long] = &[libc::SYS_connect, libc::SYS_bind];

/// Likewise, in the process that connects to other hosts, at this port.
///
/// # Errors
/// What the system refuses.
pub fn shut_dialer(port: u16) -> Result<(), StartError> {
    privileges::keep(CapabilitySet::empty())?;
    // Its own port is none in particular.
    files::restrict(Vec::new(), Some(&[(port, AccessNet::ConnectTcp), (0, AccessNet::BindTcp)]))?;
    apply([of_dialer()])
}

/// Any other call ends the process.
fn of_dialer() -> Built {
    let stream = |family: libc::c_int| {
        let kind = compare(1, MaskedEq(0xf), libc::SOCK_STREAM.cast_unsigned())?;
        let family = compare(0, Eq, family.cast_unsigned())?;
        let protocol = compare(2, Eq, libc::IPPROTO_TCP.cast_unsigned())?;
        SeccompRule::new(vec![family, kind, protocol])
    };
    let port_later = (libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT);
    let options = OPTIONS.into_iter().chain([port_later]);
    let options = options.map(|(level, name)| rule(&[(1, level), (2, name)]));
    let mut rules = common()?;
    rules.extend(CALLS_OF_DIALER.iter().map(|&call| (call, Vec::new())));
    rules.extend([
        (libc::SYS_socket, vec![stream(libc::AF_INET)?, stream(libc::AF_INET6)?]),
        (libc::SYS_setsockopt, options.collect::<Result<_, _>>()?),
    ]);
    build(rules, SeccompAction::KillProcess, SeccompAction::Allow)
}

fn common() -> Result<Vec<(libc::c_long, Vec<SeccompRule>)>, BackendError> {
    let mut rules: Vec<_> = CALLS.iter().map(|&call| (call, Vec::new())).collect();
    rules.push((libc::SYS_mmap, vec![none_of(2, libc::PROT_EXEC)?]));
    // std's debug assertion
    rules.push((libc::SYS_fcntl, vec![rule(&[(1, libc::F_GETFD)])?]));
    if cfg!(feature = "ucx") {
        // At the end UCX, which every process of the program has, puts handlers of signals back.
        rules.push((libc::SYS_rt_sigaction, Vec::new()));
    }
    Ok(rules)
}

/// These arguments are so.
fn rule(arguments: &[(u8, libc::c_int)]) -> Result<SeccompRule, BackendError> {
    let conditions = arguments.iter().map(|&(at, value)| compare(at, Eq, value.cast_unsigned()));
    SeccompRule::new(conditions.collect::<Result<_, _>>()?)
}

fn is(at: u8, value: u32) -> Result<SeccompRule, BackendError> {
    SeccompRule::new(vec![compare(at, Eq, value)?])
}

fn none_of(at: u8, bits: libc::c_int) -> Result<SeccompRule, BackendError> {
    SeccompRule::new(vec![compare(at, MaskedEq(bits.cast_unsigned().into()), 0)?])
}

fn compare(at: u8, operator: SeccompCmpOp, value: u32) -> Result<SeccompCondition, BackendError> {
    SeccompCondition::new(at, SeccompCmpArgLen::Dword, operator, value.into())
}
