//! The function against the kernel of this machine, with a traced child.

use std::arch::asm;
use std::arch::x86_64::__cpuid_count;
use std::io;
use std::ptr;

use super::*;

// Intel's SDM volume 1, section 13.4: the area begins with what FXSAVE saves, XMM0 at 160, and a
// header of 64 bytes at 512 whose first word names the components in the area. The high halves of
// YMM registers are behind it (on every CPU: CPUID leaf 13 gives their place).
const XMM0: usize = 160;
const XSTATE_BV: usize = 512;
const YMM0_HIGH: usize = 576;

const X87: u64 = 1;
const SSE: u64 = 2;
const AVX: u64 = 4;

/// The argument of user-mode Linux before 6.13.
const UML_BYTES: usize = 2696;

/// Held while registers are set: of two tests that do so at the same time one would get EAGAIN.
static ALONE: Mutex<()> = Mutex::new(());

/// Which function a test calls.
type Ptrace = unsafe extern "C" fn(c_uint, pid_t, *mut c_void, *mut c_void) -> c_long;

/// libc's.
unsafe extern "C" fn native(r: c_uint, pid: pid_t, a: *mut c_void, d: *mut c_void) -> c_long {
    // SAFETY: the caller's.
    unsafe { libc::ptrace(r, pid, a, d) }
}

/// A child that waits in a trap with its first vector register loaded. When it goes on, it ends
/// with 0 if the register then has the bytes of `expected`, else with 1.
struct Child(pid_t);

impl Child {
    fn trapped(loaded: [u8; 32], expected: [u8; 32]) -> Self {
        let has_avx = is_x86_feature_detected!("avx");
        // SAFETY: the child makes system calls only.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0, "{}", io::Error::last_os_error());
        if pid == 0 {
            // SAFETY: it has a parent, which expects to be asked.
            unsafe { libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) };
            let kept = if has_avx { through_ymm0(&loaded) } else { through_xmm0(&loaded) };
            // SAFETY: ends the process, without its handlers.
            unsafe { libc::_exit((kept != expected).into()) };
        }
        let child = Self(pid);
        assert!(libc::WIFSTOPPED(child.waits()), "it has ended");
        child
    }

    fn waits(&self) -> c_int {
        let mut status = 0;
        // SAFETY: a child of ours.
        let pid = unsafe { libc::waitpid(self.0, &raw mut status, 0) };
        assert_eq!(pid, self.0, "{}", io::Error::last_os_error());
        status
    }

    /// Its registers, as many bytes as there are.
    fn registers(&self) -> Vec<u8> {
        let mut bytes = vec![0; AREA_BYTES];
        let area = self.area_call(ptrace, libc::PTRACE_GETREGSET, &mut bytes);
        bytes.truncate(area.expect("they can be read"));
        bytes
    }

    /// Returns the length that the kernel gives back.
    fn area_call(&self, by: Ptrace, request: c_uint, bytes: &mut [u8]) -> Result<usize, c_int> {
        let mut iov = iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        let address = ptr::without_provenance_mut(NT_X86_XSTATE);
        // SAFETY: a child of ours, and an area that outlives the call.
        let result = unsafe { by(request, self.0, address, (&raw mut iov).cast()) };
        if result == 0 { Ok(iov.iov_len) } else { Err(errno()) }
    }

    fn set(&self, by: Ptrace, mut bytes: Vec<u8>) -> Result<(), c_int> {
        let _alone = ALONE.lock();
        self.area_call(by, libc::PTRACE_SETREGSET, &mut bytes).map(drop)
    }

    /// Lets it go on; its exit status.
    fn ends(self) -> c_int {
        // SAFETY: a child of ours that waits.
        let result = unsafe { ptrace(libc::PTRACE_CONT, self.0, ptr::null_mut(), ptr::null_mut()) };
        assert_eq!(result, 0, "{}", io::Error::last_os_error());
        let status = self.waits();
        assert!(libc::WIFEXITED(status), "status {status:#x}");
        libc::WEXITSTATUS(status)
    }
}

fn errno() -> c_int {
    io::Error::last_os_error().raw_os_error().expect("an error of the system")
}

fn through_ymm0(loaded: &[u8; 32]) -> [u8; 32] {
    let mut kept = [0; 32];
    // SAFETY: reads and writes 32 bytes each; the caller knows that the CPU has AVX.
    unsafe {
        asm!(
            "vmovdqu ymm0, [{from}]", "int3", "vmovdqu [{to}], ymm0", "vzeroupper",
            from = in(reg) loaded, to = in(reg) &raw mut kept, out("ymm0") _,
        );
    }
    kept
}

fn through_xmm0(loaded: &[u8; 32]) -> [u8; 32] {
    let mut kept = [0; 32];
    // SAFETY: reads and writes 16 bytes each.
    unsafe {
        asm!(
            "movdqu xmm0, [{from}]", "int3", "movdqu [{to}], xmm0",
            from = in(reg) loaded, to = in(reg) &raw mut kept, out("xmm0") _,
        );
    }
    kept
}

/// Bytes that differ from each other.
fn pattern(first: u8) -> [u8; 32] {
    std::array::from_fn(|i| first + u8::try_from(i).expect("32 of them"))
}

/// 16 bytes twice, the second half as a CPU without AVX leaves it here.
fn low_half(of: [u8; 32]) -> [u8; 32] {
    std::array::from_fn(|i| if i < 16 { of[i] } else { 0 })
}

fn put<const N: usize>(into: &mut [u8], at: usize, bytes: [u8; N]) {
    into[at..at + N].copy_from_slice(&bytes);
}

/// The kernel takes whole areas only. So every CPU can show what one with AMX does with the area of
/// user-mode Linux: here the area ends in front of what the CPU has beyond SSE.
#[test]
fn an_area_that_ends_too_early_is_lengthened() {
    let (old, new) = (pattern(1), low_half(pattern(101)));
    let child = Child::trapped(old, new);
    let mut registers = child.registers();
    let whole = registers.len();
    assert!((YMM0_HIGH..AREA_BYTES).contains(&whole), "{whole} bytes");
    registers.truncate(YMM0_HIGH);
    put(&mut registers, XSTATE_BV, (X87 | SSE).to_le_bytes());
    put(&mut registers, XMM0, *new.first_chunk::<16>().expect("32"));
    if whole > YMM0_HIGH {
        assert_eq!(child.set(native, registers.clone()), Err(libc::EFAULT), "of {whole} bytes");
    }
    child.set(ptrace, registers).expect("it is taken");
    let after = child.registers();
    assert_eq!(after[XMM0..XMM0 + 16], new[..16]);
    assert!(after[YMM0_HIGH..].iter().all(|&byte| byte == 0), "what was not named is not zero");
    assert_eq!(child.ends(), 0, "the child has something else in its register");
}

#[test]
fn whole_vector_registers_are_set_from_the_area_of_user_mode_linux() {
    let has_avx = is_x86_feature_detected!("avx");
    let (old, new) = (pattern(11), pattern(201));
    let new = if has_avx { new } else { low_half(new) };
    let child = Child::trapped(old, new);
    let mut registers = child.registers();
    registers.resize(UML_BYTES, 0);
    let mut components = X87 | SSE;
    put(&mut registers, XMM0, *new.first_chunk::<16>().expect("32"));
    if has_avx {
        assert_eq!(registers[YMM0_HIGH..YMM0_HIGH + 16], old[16..], "as the child loaded it");
        components |= AVX;
        put(&mut registers, YMM0_HIGH, *new.last_chunk::<16>().expect("32"));
    }
    put(&mut registers, XSTATE_BV, components.to_le_bytes());
    child.set(ptrace, registers).expect("it is taken");
    assert_eq!(child.ends(), 0, "the child has something else in its register");
}

/// An area after a longer one has none of its bytes.
#[test]
fn what_is_added_is_zero() {
    let mut area = Area { bytes: [0; AREA_BYTES], used: 0 };
    for (length, byte) in [(3000, 1), (UML_BYTES, 2), (576, 3), (832, 4)] {
        let iov = area.fill(&vec![byte; length]);
        assert_eq!(iov.iov_len, AREA_BYTES);
        assert!(area.bytes[..length].iter().all(|&b| b == byte), "after {length} bytes");
        assert!(area.bytes[length..].iter().all(|&b| b == 0), "after {length} bytes");
    }
}

#[test]
fn whoever_comes_at_the_same_time_is_told_to_come_again() {
    let child = Child::trapped(pattern(0), low_half(pattern(0)));
    let mut bytes = child.registers();
    let _alone = ALONE.lock();
    let area = AREA.lock();
    let second = child.area_call(ptrace, libc::PTRACE_SETREGSET, &mut bytes);
    assert_eq!(second, Err(libc::EAGAIN));
    drop(area);
    let again = child.area_call(ptrace, libc::PTRACE_SETREGSET, &mut bytes);
    assert_eq!(again, Ok(bytes.len()));
    child.ends();
}

/// CPUID leaf 13: bytes of an area with all components that the CPU has.
#[test]
fn the_area_has_room_for_all_that_this_cpu_has() {
    let all = __cpuid_count(13, 0).ecx;
    assert!(usize::try_from(all).is_ok_and(|all| all <= AREA_BYTES), "{all} bytes");
}

#[test]
fn words_are_peeked_as_by_libc_and_errors_are_passed() {
    static WORD: [c_long; 2] = [-1, 0x0123_4567_89ab_cdef];
    let child = Child::trapped(pattern(0), pattern(0));
    for word in &WORD {
        let at = (&raw const *word).cast_mut().cast();
        set_errno(libc::EPERM);
        // SAFETY: a child of ours, which has the same memory.
        let peeked = unsafe { ptrace(libc::PTRACE_PEEKDATA, child.0, at, ptr::null_mut()) };
        assert_eq!((peeked, errno()), (*word, 0));
    }
    // SAFETY: null is nowhere.
    let nowhere =
        unsafe { ptrace(libc::PTRACE_PEEKDATA, child.0, ptr::null_mut(), ptr::null_mut()) };
    assert_eq!((nowhere, errno()), (-1, libc::EIO));
    let null = ptr::without_provenance_mut(NT_X86_XSTATE);
    // SAFETY: null is no iovec; the kernel says so.
    let nothing = unsafe { ptrace(libc::PTRACE_SETREGSET, child.0, null, ptr::null_mut()) };
    assert_eq!((nothing, errno()), (-1, libc::EFAULT));
    // Not ours to trace.
    let own = Child(std::process::id().cast_signed());
    assert_eq!(own.set(ptrace, vec![0; UML_BYTES]), Err(libc::ESRCH));
    let expected = if is_x86_feature_detected!("avx") { 0 } else { 1 };
    assert_eq!(child.ends(), expected);
}
