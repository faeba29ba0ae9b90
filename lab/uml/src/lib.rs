//! Preloaded into user-mode Linux (`LD_PRELOAD=libnightporter_uml.so linux.uml ...`), it lets
//! guests of a version before 6.13 keep their vector registers on every CPU.
//!
//! User-mode Linux runs the programs of its guest as processes that it traces, and sets their
//! registers whenever it lets one of them go on: after each page fault, system call and switch of
//! threads. It writes the vector registers by PTRACE_SETREGSET of NT_X86_XSTATE, before 6.13
//! (commit 3f17fed21491) from an area of 2,696 bytes. The kernel of the host takes a whole area
//! only (`xstateregs_set` in arch/x86/kernel/fpu/regset.c), which has 11,008 bytes on a CPU with
//! AMX, and refuses a shorter one with EFAULT. Then no program of a guest starts.
//!
//! This library exports one function, `ptrace`, which does what libc's does, except that it
//! lengthens such an area by zeros. The kernel takes only as much of it as the CPU has, and ignores
//! what belongs to components that the area's XSTATE_BV does not name, so the rest has no meaning.

use std::mem::MaybeUninit;
use std::sync::Mutex;

use libc::{c_int, c_long, c_uint, c_void, iovec, pid_t};

/// The registers that XSAVE saves (linux/elf.h).
const NT_X86_XSTATE: usize = 0x202;

/// Bytes of the area that the kernel gets: more than any CPU saves today. (The largest, with AMX,
/// saves 11,008.)
const AREA_BYTES: usize = 16 << 10;

/// The kernel's arguments.
struct Area {
    bytes: [u8; AREA_BYTES],
    /// All bytes from here on are zero.
    used: usize,
}

/// Static because a stack of user-mode Linux's kernel has 16 KiB itself.
static AREA: Mutex<Area> = Mutex::new(Area { bytes: [0; AREA_BYTES], used: 0 });

impl Area {
    fn fill(&mut self, from: &[u8]) -> iovec {
        let stale = self.used.max(from.len());
        self.bytes[..from.len()].copy_from_slice(from);
        self.bytes[from.len()..stale].fill(0);
        self.used = from.len();
        iovec { iov_base: self.bytes.as_mut_ptr().cast(), iov_len: AREA_BYTES }
    }
}

/// ptrace(2) as of libc. Arguments after the first are optional there, and passed in the same
/// registers.
///
/// # Errors
/// -1 and errno. EAGAIN, if another thread, or a signal handler within this thread, sets registers
/// at the same time; user-mode Linux before 6.13 has one thread that does.
///
/// # Safety
/// As libc's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn ptrace(
    request: c_uint,
    pid: pid_t,
    address: *mut c_void,
    data: *mut c_void,
) -> c_long {
    match request {
        libc::PTRACE_PEEKTEXT | libc::PTRACE_PEEKDATA | libc::PTRACE_PEEKUSER => {
            let mut word = MaybeUninit::<c_long>::uninit();
            // SAFETY: the kernel writes a word there (ptrace(2), "C library/kernel differences").
            let result = unsafe { call(request, pid, address, word.as_mut_ptr().cast()) };
            if result < 0 {
                return result;
            }
            set_errno(0); // -1 is a word too
            // SAFETY: the kernel has written it.
            unsafe { word.assume_init() }
        }
        libc::PTRACE_SETREGSET if address.addr() == NT_X86_XSTATE && !data.is_null() => {
            // SAFETY: the caller's, which is an iovec for this request.
            let given = unsafe { data.cast::<iovec>().read() };
            if given.iov_base.is_null() || given.iov_len >= AREA_BYTES {
                // SAFETY: the caller's arguments.
                return unsafe { call(request, pid, address, data) };
            }
            let Ok(mut area) = AREA.try_lock() else {
                set_errno(libc::EAGAIN);
                return -1;
            };
            // SAFETY: the caller's area, which has so many bytes.
            let from = unsafe { std::slice::from_raw_parts(given.iov_base.cast(), given.iov_len) };
            let mut whole = area.fill(from);
            // SAFETY: `whole` describes `area`, which is locked until the call is over.
            unsafe { call(request, pid, address, (&raw mut whole).cast()) }
        }
        // SAFETY: the caller's arguments.
        _ => unsafe { call(request, pid, address, data) },
    }
}

/// The system call. Sets errno if it returns -1.
///
/// # Safety
/// As ptrace(2).
unsafe fn call(request: c_uint, pid: pid_t, address: *mut c_void, data: *mut c_void) -> c_long {
    // SAFETY: the caller's arguments, each in the width of a register.
    unsafe {
        libc::syscall(libc::SYS_ptrace, c_long::from(request), c_long::from(pid), address, data)
    }
}

fn set_errno(errno: c_int) {
    // SAFETY: the address of this thread's errno is valid.
    unsafe { *libc::__errno_location() = errno };
}

#[cfg(test)]
mod tests;
