//! bpf(2), as far as it is needed: a map, programs, links; and the mapping of the map.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::AtomicU64;

use nix::libc;

use crate::Hook;
use crate::area::WORDS;
use crate::code::Instruction;

// include/uapi/linux/bpf.h, Linux 6.6.
const MAP_CREATE: libc::c_int = 0;
const PROG_LOAD: libc::c_int = 5;
const LINK_CREATE: libc::c_int = 28;
const MAP_TYPE_ARRAY: u32 = 2;
const PROG_TYPE_SCHED_CLS: u32 = 3;
/// The map's value can be mapped.
const F_MMAPABLE: u32 = 1 << 10;
/// The link goes before all others.
const F_BEFORE: u32 = 1 << 3;
const TCX_INGRESS: u32 = 46;
const TCX_EGRESS: u32 = 47;
/// Bytes of a name and the zero behind it (BPF_OBJ_NAME_LEN).
const NAME: usize = 16;

/// A `union bpf_attr`: as long as the longest that is used here, and zeros where nothing is said.
struct Attr([u8; 128]);

impl Attr {
    const fn new() -> Self {
        Self([0; 128])
    }

    fn word(mut self, at: usize, value: u32) -> Self {
        self.0[at..at + 4].copy_from_slice(&value.to_ne_bytes());
        self
    }

    fn bytes(mut self, at: usize, value: &[u8]) -> Self {
        self.0[at..at + value.len()].copy_from_slice(value);
        self
    }

    fn pointer<T: ?Sized>(self, at: usize, value: *const T) -> Self {
        self.bytes(at, &(value.addr() as u64).to_ne_bytes())
    }
}

/// # Safety
/// What `attr` points to is there, for as long as the call takes.
unsafe fn call(command: libc::c_int, attr: &Attr) -> io::Result<OwnedFd> {
    // SAFETY: the kernel reads `attr`, and what it points to, which the caller answers for.
    // JUSTIFICATION: the crates that wrap bpf(2) bring a loader of ELF files (lib.rs).
    let fd = unsafe { libc::syscall(libc::SYS_bpf, command, attr.0.as_ptr(), attr.0.len()) };
    match i32::try_from(fd) {
        // SAFETY: each of the commands used here returns a descriptor that is the caller's.
        // JUSTIFICATION: as above.
        Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(io::Error::last_os_error()),
    }
}

fn name(name: &str) -> [u8; NAME] {
    let mut bytes = [0; NAME];
    bytes[..name.len()].copy_from_slice(name.as_bytes());
    bytes
}

/// A map of one value that can be mapped.
pub(crate) fn make_area() -> io::Result<OwnedFd> {
    let bytes = u32::try_from(WORDS * size_of::<u64>()).expect("a few pages");
    let attr = Attr::new().word(0, MAP_TYPE_ARRAY).word(4, 4).word(8, bytes).word(12, 1);
    let attr = attr.word(16, F_MMAPABLE).bytes(28, &name("np_area"));
    // SAFETY: it points to nothing.
    // JUSTIFICATION: see `call`.
    unsafe { call(MAP_CREATE, &attr) }
}

/// Maps an area for ever.
pub(crate) fn map_area(fd: BorrowedFd<'_>) -> io::Result<&'static [AtomicU64; WORDS]> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let (len, fd) = (WORDS * size_of::<u64>(), fd.as_raw_fd());
    // SAFETY: a fresh mapping at an address of the kernel's choice aliases nothing.
    // JUSTIFICATION: std has no mmap.
    let start =
        unsafe { libc::mmap(std::ptr::null_mut(), len, protection, libc::MAP_SHARED, fd, 0) };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the mapping is `len` bytes, page-aligned, of any bit pattern, which an atomic may
    // have, and never unmapped. The value of such a map is memory of the kernel that stays as long
    // as it is mapped: no access can fault. Others change it by atomic accesses.
    // JUSTIFICATION: the worker stores there in each turn, and a system call is too slow for that.
    Ok(unsafe { &*start.cast::<[AtomicU64; WORDS]>() })
}

/// Loads a program; the kernel verifies it.
pub(crate) fn load(program: &str, code: &[Instruction]) -> io::Result<OwnedFd> {
    let license = CString::new("Apache-2.0").expect("no zero in it");
    let count = u32::try_from(code.len()).expect("a few dozen");
    let attr = Attr::new().word(0, PROG_TYPE_SCHED_CLS).word(4, count).pointer(8, code);
    let attr = attr.pointer(16, license.as_ptr()).bytes(48, &name(&format!("np_{program}")));
    // SAFETY: it points to `code`, which has `count` instructions, and to a string with its zero.
    // JUSTIFICATION: see `call`.
    unsafe { call(PROG_LOAD, &attr) }
}

/// Puts a program on a hook of an interface, before all others there.
pub(crate) fn link(program: &OwnedFd, index: u32, hook: Hook) -> io::Result<OwnedFd> {
    let place = match hook {
        Hook::Ingress => TCX_INGRESS,
        Hook::Egress => TCX_EGRESS,
    };
    let program = program.as_raw_fd().cast_unsigned();
    let attr = Attr::new().word(0, program).word(4, index).word(8, place).word(12, F_BEFORE);
    // SAFETY: it points to nothing.
    // JUSTIFICATION: see `call`.
    unsafe { call(LINK_CREATE, &attr) }
}

/// Whether the kernel has tcx: no program is linked to no interface. Kernels that have it find that
/// the interface is missing, older ones do not know the hook.
pub(crate) fn has_tcx() -> io::Result<bool> {
    let code = [[0xb7, 0, 0, 0, 0, 0, 0, 0], [0x95, 0, 0, 0, 0, 0, 0, 0]]; // return 0
    let linked = link(&load("probe", &code)?, 0, Hook::Ingress);
    Ok(linked.is_err_and(|e| e.raw_os_error() == Some(libc::ENODEV)))
}
