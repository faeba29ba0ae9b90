//! System calls of other processes: the filter that hands them over, and their execution for a
//! process (`Documentation/userspace-api/seccomp_filter.rst` of Linux).

use std::fs;
use std::io;
use std::mem;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use libc::{c_int, c_long, c_void, sock_filter};
use nightporter_core::toe::control::Program;
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};

use crate::sys::{self, Fd, Res};
use crate::tcp_only::TCP_ONLY;

/// The calls that are handed over.
const CALLS: [c_long; 6] = [
    libc::SYS_connect,
    libc::SYS_listen,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
];

/// `include/uapi/linux/audit.h`: a filter that does not look at the architecture can be evaded.
#[cfg(target_arch = "x86_64")]
const ARCHITECTURE: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const ARCHITECTURE: u32 = 0xc000_00b7;

/// The calls of x32 have the architecture of all others, and this bit in their numbers
/// (`__X32_SYSCALL_BIT` of Linux).
const X32: u32 = 0x4000_0000;

/// `include/linux/errno.h`: the kernel makes EINTR of it, or begins the call anew, as the signal's
/// handler was installed. It must have a signal for the thread, or the program sees this number.
const ERESTARTSYS: c_int = 512;

/// A call that waits for its answer.
#[derive(Debug)]
pub(crate) struct Call {
    id: u64,
    pid: c_int,
    pub(crate) number: c_long,
    pub(crate) arguments: [u64; 6],
}

/// A copy of another process's descriptor, or one of our own.
#[derive(Debug)]
pub(crate) struct Owned(pub(crate) Fd);

impl Drop for Owned {
    fn drop(&mut self) {
        sys::close_fd(self.0);
    }
}

/// See the module doc.
#[derive(Debug)]
pub(crate) struct Watch {
    fd: OwnedFd,
    taken: &'static Taken,
}

/// The calls that were handed over: their numbers count up from a random one. The process that
/// stands in for a killed launcher has this memory, too.
#[derive(Debug)]
struct Taken {
    /// 0 until there was one.
    first: AtomicU64,
    last: AtomicU64,
}

/// A launcher may be killed between taking a call and noting it.
const UNNOTED: u64 = 1024;
/// Of so many calls one may still wait.
const WAITING_MAX: u64 = 1 << 20;

impl Taken {
    fn new() -> io::Result<&'static Self> {
        let (read, shared) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        // SAFETY: new memory, of zeroes, which is never unmapped.
        let at = unsafe {
            let flags = shared | libc::MAP_ANONYMOUS;
            libc::mmap(ptr::null_mut(), size_of::<Self>(), read, flags, -1, 0)
        };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: as many bytes are there, and zeroes are one.
        Ok(unsafe { &*at.cast::<Self>() })
    }

    fn note(&self, id: u64) {
        let _ = self.first.compare_exchange(0, id, Ordering::Relaxed, Ordering::Relaxed);
        self.last.fetch_max(id, Ordering::Relaxed);
    }
}

fn filter() -> Vec<sock_filter> {
    let statement = |code: u32, k: u32| sock_filter { code: narrow(code), jt: 0, jf: 0, k };
    let load = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    let answer = libc::BPF_RET | libc::BPF_K;
    let refusal = libc::SECCOMP_RET_ERRNO | libc::ENOSYS.cast_unsigned();
    // struct seccomp_data: the number, the architecture. Other architectures are let through: a
    // program of 32 bits stays native.
    let jump = |code: u32, k: u32, jt: usize, jf: u8| sock_filter {
        code: narrow(libc::BPF_JMP | code | libc::BPF_K),
        jt: u8::try_from(jt).expect("few calls"),
        jf,
        k,
    };
    let equal = |k, jt, jf| jump(libc::BPF_JEQ, k, jt, jf);
    let mut program = vec![statement(load, 4), equal(ARCHITECTURE, 1, 0)];
    program.push(statement(answer, libc::SECCOMP_RET_ALLOW));
    program.push(statement(load, 0));
    // A call by its number of x32 would pass by the launcher, as an accept() that takes the
    // launcher's own end for a client. A kernel without x32 refuses it in the same way. A tracer
    // that has done a call itself makes its number -1: its result is not to be changed.
    if cfg!(target_arch = "x86_64") {
        program.push(jump(libc::BPF_JGE, X32, 0, 2));
        program.push(equal(u32::MAX, 1, 0));
        program.push(statement(answer, refusal));
    }
    // The launcher does not see what a ring of io_uring does: an accept() by it would take the
    // launcher's own end for a client. Programs that can do without it do so after ENOSYS.
    let ring = u32::try_from(libc::SYS_io_uring_setup).expect("small");
    program.push(equal(ring, 0, 1));
    program.push(statement(answer, refusal));
    for (i, call) in CALLS.into_iter().enumerate() {
        let to_the_end = CALLS.len() - i + 1 + 4 * TCP_ONLY.len();
        program.push(equal(u32::try_from(call).expect("small"), to_the_end, 0));
    }
    // Of setsockopt() what makes a socket one for TCP alone. struct seccomp_data has arguments of
    // 64 bits from byte 16 on.
    let call = u32::try_from(libc::SYS_setsockopt).expect("small");
    let options = u8::try_from(4 * TCP_ONLY.len()).expect("few options");
    program.push(equal(call, 0, options));
    for (i, (level, name)) in TCP_ONLY.into_iter().enumerate() {
        program.push(statement(load, 24));
        program.push(equal(level.cast_unsigned(), 0, 2));
        program.push(statement(load, 32));
        program.push(equal(name.cast_unsigned(), 4 * (TCP_ONLY.len() - 1 - i) + 1, 0));
    }
    program.push(statement(answer, libc::SECCOMP_RET_ALLOW));
    program.push(statement(answer, libc::SECCOMP_RET_USER_NOTIF));
    program
}

fn narrow(code: u32) -> u16 {
    u16::try_from(code).expect("codes of BPF have 16 bits")
}

/// Puts this process under the filter.
fn install() -> io::Result<OwnedFd> {
    let mut filter = filter();
    let program = libc::sock_fprog {
        len: u16::try_from(filter.len()).expect("few calls"),
        filter: filter.as_mut_ptr(),
    };
    let install = |flags: libc::c_ulong| {
        let flags = flags | libc::SECCOMP_FILTER_FLAG_NEW_LISTENER;
        // SAFETY: the program is there, with its length.
        unsafe {
            let mode = libc::SECCOMP_SET_MODE_FILTER;
            libc::syscall(libc::SYS_seccomp, mode, flags, &raw const program)
        }
    };
    // Since Linux 5.19 a call that the launcher has taken up is not interrupted by signals.
    let set = || match install(libc::SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV) {
        refused if refused < 0 && sys::errno() == libc::EINVAL => install(0),
        given => given,
    };
    let mut fd = set();
    if fd < 0 && sys::errno() == libc::EACCES {
        // A process without root needs no_new_privs for this.
        // SAFETY: no pointers.
        unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
        fd = set();
    }
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    let fd = RawFd::try_from(fd).expect("a descriptor");
    // SAFETY: the kernel has made it for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Starts a program under the filter.
pub(crate) fn start(mut command: Command) -> io::Result<(Child, Watch)> {
    let (ours, theirs) = UnixStream::pair()?;
    let prepare = move || {
        let fd = install()?;
        let (data, fds) = ([io::IoSlice::new(b"f")], [fd.as_raw_fd()]);
        let rights = [ControlMessage::ScmRights(&fds)];
        sendmsg::<()>(theirs.as_raw_fd(), &data, &rights, MsgFlags::empty(), None)?;
        Ok(())
    };
    // SAFETY: this process has one thread, so its child may do what it does itself.
    unsafe { command.pre_exec(prepare) };
    let child = command.spawn()?;
    drop(command);
    let (mut byte, mut space) = ([0], nix::cmsg_space!(RawFd));
    let mut data = [io::IoSliceMut::new(&mut byte)];
    let flags = MsgFlags::MSG_CMSG_CLOEXEC;
    let message = recvmsg::<()>(ours.as_raw_fd(), &mut data, Some(&mut space), flags)?;
    let Some(ControlMessageOwned::ScmRights(fds)) = message.cmsgs()?.next() else {
        return Err(io::ErrorKind::UnexpectedEof.into());
    };
    // SAFETY: it has just come, and is nobody else's.
    let fd = unsafe { OwnedFd::from_raw_fd(fds[0]) };
    let watch = Watch { fd, taken: Taken::new()? };
    watch.have_a_stand_in()?;
    // The terminal's signals are for the program.
    for signal in [libc::SIGINT, libc::SIGQUIT] {
        // SAFETY: no handler.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
    Ok((child, watch))
}

/// The answer that lets a call through.
fn through(id: u64) -> libc::seccomp_notif_resp {
    let flags = u32::try_from(libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE).expect("1");
    libc::seccomp_notif_resp { id, val: 0, error: 0, flags }
}

/// A descriptor that a call has given.
fn owned(given: c_long) -> Res<Owned> {
    let fd = c_int::try_from(given).ok().filter(|fd| *fd >= 0);
    fd.map(Owned).ok_or_else(sys::errno)
}

/// The launcher has two descriptors for each connection of all its programs: it takes as many as it
/// may. They keep the limit that they have.
pub(crate) fn raise_limit() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a limit is there.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } == 0 {
        limit.rlim_cur = limit.rlim_max;
        // SAFETY: as before.
        unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
    }
}

/// A shell's exit code for the end of a program.
pub(crate) fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
}

impl Watch {
    /// Without any process that has this descriptor the kernel fails all calls that are handed over
    /// with ENOSYS. So another process has it, which does nothing unless the launcher is killed:
    /// then all calls are the kernel's, also those that wait.
    fn have_a_stand_in(&self) -> io::Result<()> {
        let (launcher, alive) = io::pipe()?;
        // SAFETY: this process has one thread, so its child may do what it does itself.
        match unsafe { libc::fork() } {
            -1 => return Err(io::Error::last_os_error()),
            0 => {}
            _ => {
                // Open for as long as the launcher lives, and in no program of its.
                let _ = alive.into_raw_fd();
                return Ok(());
            }
        }
        // The watcher closes all other descriptors: readers of the programs' pipes wait for their
        // end.
        let (from, to) = (self.fd.as_raw_fd(), launcher.as_raw_fd());
        let (first, second) = (from.min(to).cast_unsigned(), from.max(to).cast_unsigned());
        // SAFETY: no pointers; the owners of these descriptors do not run from here on.
        unsafe {
            for fd in 0..first {
                libc::close(fd.cast_signed());
            }
            libc::close_range(first + 1, second - 1, 0);
            libc::close_range(second + 1, libc::c_uint::MAX, 0);
            libc::chdir(c"/".as_ptr());
            libc::prctl(libc::PR_SET_NAME, c"toe-stand-in".as_ptr());
        }
        self.stand_in(launcher.as_raw_fd());
        // SAFETY: no pointers. Nothing of the launcher's is to run at the end of this process.
        unsafe { libc::_exit(0) }
    }

    /// Lets all calls through, once the launcher is no more.
    fn stand_in(&self, launcher: RawFd) {
        let nobody_left = |revents| revents & (libc::POLLHUP | libc::POLLERR) != 0;
        loop {
            let entry = |fd| libc::pollfd { fd, events: 0, revents: 0 };
            let mut list = [entry(launcher), entry(self.fd.as_raw_fd())];
            // SAFETY: two are there.
            unsafe { libc::poll(list.as_mut_ptr(), 2, -1) };
            if nobody_left(list[1].revents) {
                return;
            }
            if list[0].revents != 0 {
                break;
            }
        }
        let last = self.taken.last.load(Ordering::Relaxed);
        let first = self.taken.first.load(Ordering::Relaxed).max(last.saturating_sub(WAITING_MAX));
        for id in first..=last.saturating_add(UNNOTED) {
            self.respond(&through(id));
        }
        while let Some(call) = self.next() {
            self.let_through(&call);
        }
    }

    /// The next call. `None`: no process is left that could make one.
    pub(crate) fn next(&self) -> Option<Call> {
        loop {
            let mut list =
                libc::pollfd { fd: self.fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: one is there.
            unsafe { libc::poll(&raw mut list, 1, -1) };
            if list.revents & libc::POLLIN == 0 {
                if list.revents != 0 {
                    return None;
                }
                continue;
            }
            // SAFETY: zeroes are a valid value, and the kernel expects them.
            let mut got: libc::seccomp_notif = unsafe { mem::zeroed() };
            // SAFETY: one is there.
            let result = unsafe {
                libc::ioctl(self.fd.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_RECV, &raw mut got)
            };
            // The caller may have been killed meanwhile.
            if result == 0 {
                self.taken.note(got.id);
                return Some(Call {
                    id: got.id,
                    pid: got.pid.cast_signed(),
                    number: c_long::from(got.data.nr),
                    arguments: got.data.args,
                });
            }
        }
    }

    /// Whether it still waits.
    pub(crate) fn is_waiting(&self, call: &Call) -> bool {
        let (fd, what) = (self.fd.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_ID_VALID);
        // SAFETY: a number is there.
        unsafe { libc::ioctl(fd, what, &raw const call.id) == 0 }
    }

    /// The result of a call that may wait for long, if a signal is pending.
    pub(crate) fn interruption(&self, call: &Call) -> Option<c_int> {
        let status = fs::read_to_string(format!("/proc/{}/status", call.pid)).ok()?;
        let number = |name: &str, radix| {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            u64::from_str_radix(line.trim(), radix).ok()
        };
        let heard = !number("SigBlk:", 16)?;
        let (own, shared) = (number("SigPnd:", 16)? & heard, number("ShdPnd:", 16)? & heard);
        match (own != 0, shared != 0, number("Threads:", 10)? == 1) {
            (true, ..) | (_, true, true) => Some(ERESTARTSYS),
            // It may be for another thread.
            (_, true, false) => Some(libc::EINTR),
            _ => None,
        }
    }

    /// Whether a caller waited for it: a signal may have come first, and the call comes again.
    fn respond(&self, response: &libc::seccomp_notif_resp) -> bool {
        let (fd, what) = (self.fd.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_SEND);
        // SAFETY: a response is there.
        unsafe { libc::ioctl(fd, what, ptr::from_ref(response)) == 0 }
    }

    /// The kernel does it.
    pub(crate) fn let_through(&self, call: &Call) -> bool {
        self.respond(&through(call.id))
    }

    /// It was done, with this result.
    pub(crate) fn answer(&self, call: &Call, result: Res<i64>) -> bool {
        let (val, error) = result.map_or_else(|errno| (0, -errno), |val| (val, 0));
        self.respond(&libc::seccomp_notif_resp { id: call.id, val, error, flags: 0 })
    }

    /// It was done, and gives a descriptor. Returns whether the caller took it.
    pub(crate) fn give(&self, call: &Call, fd: Fd, closes_on_exec: bool) -> bool {
        let (given, what) = (libc::SECCOMP_ADDFD_FLAG_SEND, libc::SECCOMP_IOCTL_NOTIF_ADDFD);
        let flags = if closes_on_exec { libc::O_CLOEXEC } else { 0 };
        let given = libc::seccomp_notif_addfd {
            id: call.id,
            flags: u32::try_from(given).expect("2"),
            srcfd: fd.cast_unsigned(),
            newfd: 0,
            newfd_flags: flags.cast_unsigned(),
        };
        // SAFETY: one is there.
        let result = unsafe { libc::ioctl(self.fd.as_raw_fd(), what, &raw const given) };
        if result < 0 {
            self.answer(call, Err(sys::errno()));
        }
        result >= 0
    }

    /// The process of the thread that has called.
    fn process(call: &Call) -> Res<c_int> {
        let status = fs::read_to_string(format!("/proc/{}/status", call.pid));
        let status = status.map_err(|error| error.raw_os_error().unwrap_or(libc::ESRCH))?;
        let process = status.lines().find_map(|line| line.strip_prefix("Tgid:"));
        process.and_then(|process| process.trim().parse().ok()).ok_or(libc::ESRCH)
    }

    /// Which program has called.
    pub(crate) fn program(&self, call: &Call) -> Program {
        let name =
            Self::process(call).ok().and_then(|it| fs::read(format!("/proc/{it}/comm")).ok());
        // The number of a process that is gone may be another's.
        let name = name.filter(|_| self.is_waiting(call)).unwrap_or_default();
        Program::of(name.strip_suffix(b"\n").unwrap_or(&name))
    }

    /// A copy of a descriptor of the caller. `EPERM`: the launcher may not inspect that program.
    pub(crate) fn descriptor(&self, call: &Call, fd: u64) -> Res<Owned> {
        let process = Self::process(call)?;
        let fd = c_int::try_from(fd).map_err(|_| libc::EBADF)?;
        // SAFETY: no pointers.
        let pidfd = owned(unsafe { libc::syscall(libc::SYS_pidfd_open, process, 0) })?;
        // SAFETY: no pointers.
        let copy = owned(unsafe { libc::syscall(libc::SYS_pidfd_getfd, pidfd.0, fd, 0) })?;
        // The number of a process that is gone may be another's.
        if self.is_waiting(call) { Ok(copy) } else { Err(libc::ESRCH) }
    }

    /// Bytes of the caller.
    pub(crate) fn read(&self, call: &Call, at: u64, bytes: &mut [u8]) -> Res {
        let ours = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        let theirs = libc::iovec { iov_base: address(at), iov_len: bytes.len() };
        // SAFETY: as many bytes are there; the kernel checks the other process's addresses.
        let got = unsafe {
            libc::process_vm_readv(call.pid, &raw const ours, 1, &raw const theirs, 1, 0)
        };
        if usize::try_from(got) == Ok(bytes.len()) { Ok(()) } else { Err(libc::EFAULT) }
    }

    /// Changes bytes of the caller.
    pub(crate) fn write(&self, call: &Call, at: u64, bytes: &[u8]) -> Res {
        let ours = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        let theirs = libc::iovec { iov_base: address(at), iov_len: bytes.len() };
        if !self.is_waiting(call) {
            return Err(libc::ESRCH);
        }
        // SAFETY: as many bytes are there, and are read; the kernel checks the other process's
        // addresses.
        let put = unsafe {
            libc::process_vm_writev(call.pid, &raw const ours, 1, &raw const theirs, 1, 0)
        };
        if usize::try_from(put) == Ok(bytes.len()) { Ok(()) } else { Err(libc::EFAULT) }
    }
}

/// An address of another process.
fn address(at: u64) -> *mut c_void {
    ptr::without_provenance_mut(usize::try_from(at).expect("64 bits"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const REFUSED: u32 = libc::SECCOMP_RET_ERRNO | libc::ENOSYS.cast_unsigned();

    /// The verdict of the filter on a call, by the few instructions that it has
    /// (linux/bpf_common.h, linux/seccomp.h). So it is judged on kernels that do not have such
    /// calls, and nobody has to make them.
    fn verdict(architecture: u32, number: u32, arguments: [u64; 6]) -> u32 {
        let word = |it: u64| u32::try_from(it & u64::from(u32::MAX)).expect("32 bits");
        let words = arguments.map(|it| [word(it), word(it >> 32)]);
        let data = [&[number, architecture, 0, 0], words.as_flattened()].concat();
        let (program, mut at, mut held) = (filter(), 0, 0);
        loop {
            let sock_filter { code, jt, jf, k } = program[at];
            at += 1;
            let branch = |is_so: bool| usize::from(if is_so { jt } else { jf });
            match code {
                0x20 => held = data[k as usize / 4], // LD | W | ABS
                0x15 => at += branch(held == k),     // JMP | JEQ | K
                0x35 => at += branch(held >= k),     // JMP | JGE | K
                0x06 => return k,                    // RET | K
                _ => panic!("an instruction {code:#x}"),
            }
        }
    }

    fn number(call: c_long) -> u32 {
        u32::try_from(call).expect("small")
    }

    /// On any call, of this machine's own architecture.
    fn of(call: c_long) -> u32 {
        verdict(ARCHITECTURE, number(call), [0; 6])
    }

    #[test]
    fn the_calls_of_sockets_are_handed_over_and_others_are_the_kernels() {
        for call in CALLS {
            assert_eq!(of(call), libc::SECCOMP_RET_USER_NOTIF, "{call}");
            assert_eq!(verdict(0x4000_0003, number(call), [0; 6]), libc::SECCOMP_RET_ALLOW);
        }
        for call in [libc::SYS_read, libc::SYS_socket, libc::SYS_bind, libc::SYS_setsockopt] {
            assert_eq!(of(call), libc::SECCOMP_RET_ALLOW, "{call}");
        }
        assert_eq!(of(libc::SYS_io_uring_setup), REFUSED);
        let set = |level: c_int, name: c_int| {
            let arguments = [3, level.cast_unsigned().into(), name.cast_unsigned().into(), 0, 0, 0];
            verdict(ARCHITECTURE, number(libc::SYS_setsockopt), arguments)
        };
        for (level, name) in TCP_ONLY {
            assert_eq!(set(level, name), libc::SECCOMP_RET_USER_NOTIF, "{level} {name}");
            assert_eq!(set(level, -1), libc::SECCOMP_RET_ALLOW);
        }
        assert_eq!(set(libc::IPPROTO_TCP, libc::TCP_NODELAY), libc::SECCOMP_RET_ALLOW);
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn no_call_passes_by_the_launcher_by_its_number_of_x32() {
        // `arch/x86/entry/syscalls/syscall_64.tbl`: setsockopt() has a number of its own.
        let own = [libc::SYS_read, libc::SYS_io_uring_setup, 541];
        for call in CALLS.into_iter().chain(own) {
            assert_eq!(verdict(ARCHITECTURE, X32 | number(call), [0; 6]), REFUSED, "{call}");
        }
        assert_eq!(verdict(ARCHITECTURE, X32 - 1, [0; 6]), libc::SECCOMP_RET_ALLOW);
        // The result of a call that a tracer has done is the tracer's.
        assert_eq!(verdict(ARCHITECTURE, u32::MAX, [0; 6]), libc::SECCOMP_RET_ALLOW);
    }
}
