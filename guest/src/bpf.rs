//! bpf(2), as far as an XDP program with one counter map needs it. The kernel headers are not
//! bound: four structs suffice.

use std::ffi::CString;
use std::io;
use std::mem;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

// bpf(2) and include/uapi/linux/bpf.h, Linux 6.1.
const BPF_MAP_CREATE: u32 = 0;
const BPF_MAP_LOOKUP_ELEM: u32 = 1;
const BPF_PROG_LOAD: u32 = 5;
const BPF_LINK_CREATE: u32 = 28;
const BPF_MAP_TYPE_ARRAY: u32 = 2;
const BPF_PROG_TYPE_XDP: u32 = 6;
const BPF_XDP: u32 = 37;
const XDP_FLAGS_SKB_MODE: u32 = 2;

/// One eBPF instruction: opcode, registers (source in the high nibble), offset, immediate.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Insn {
    code: u8,
    regs: u8,
    off: i16,
    imm: i32,
}

/// An instruction from its parts.
pub(crate) const fn insn(code: u8, dst: u8, src: u8, off: i16, imm: i32) -> Insn {
    Insn { code, regs: src << 4 | dst, off, imm }
}

/// An array map of `entries` 64-bit counters.
pub(crate) fn map_create(entries: u32) -> io::Result<OwnedFd> {
    #[repr(C)]
    struct Attr {
        map_type: u32,
        key_size: u32,
        value_size: u32,
        max_entries: u32,
    }
    let attr =
        Attr { map_type: BPF_MAP_TYPE_ARRAY, key_size: 4, value_size: 8, max_entries: entries };
    bpf_fd(BPF_MAP_CREATE, &attr)
}

/// Loads an XDP program, verified by the kernel.
pub(crate) fn prog_load(program: &[Insn]) -> io::Result<OwnedFd> {
    #[repr(C)]
    struct Attr {
        prog_type: u32,
        insn_cnt: u32,
        insns: u64,
        license: u64,
    }
    let license = CString::new("Apache-2.0").expect("no NUL inside");
    let attr = Attr {
        prog_type: BPF_PROG_TYPE_XDP,
        insn_cnt: u32::try_from(program.len()).expect("a short program"),
        insns: program.as_ptr() as u64,
        license: license.as_ptr() as u64,
    };
    bpf_fd(BPF_PROG_LOAD, &attr)
}

/// Attaches the program to an interface, in SKB mode, for as long as the returned link lives.
pub(crate) fn link_create(program: &OwnedFd, interface: &str) -> io::Result<OwnedFd> {
    #[repr(C)]
    struct Attr {
        prog_fd: RawFd,
        target_ifindex: u32,
        attach_type: u32,
        flags: u32,
    }
    let index = nix::net::if_::if_nametoindex(interface)?;
    let attr = Attr {
        prog_fd: program.as_raw_fd(),
        target_ifindex: index,
        attach_type: BPF_XDP,
        flags: XDP_FLAGS_SKB_MODE,
    };
    bpf_fd(BPF_LINK_CREATE, &attr)
}

/// Counter `key` of the map.
pub(crate) fn map_lookup(map: &OwnedFd, key: u32) -> io::Result<u64> {
    #[repr(C)]
    struct Attr {
        map_fd: RawFd,
        key: u64,
        value: u64,
        flags: u64,
    }
    let mut value = 0_u64;
    let attr = Attr {
        map_fd: map.as_raw_fd(),
        key: (&raw const key) as u64,
        value: (&raw mut value) as u64,
        flags: 0,
    };
    bpf(BPF_MAP_LOOKUP_ELEM, &attr)?;
    Ok(value)
}

fn bpf_fd<T>(command: u32, attr: &T) -> io::Result<OwnedFd> {
    let fd = bpf(command, attr)?;
    // SAFETY: the kernel has just opened this descriptor for us and nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn bpf<T>(command: u32, attr: &T) -> io::Result<RawFd> {
    let size = u32::try_from(mem::size_of::<T>()).expect("a small struct");
    // SAFETY: `attr` is a prefix of the kernel's union bpf_attr for `command`, laid out by repr(C)
    // and `size` bytes long. The callers above see to it that the memory it points to outlives the
    // call and that `value` is writable and as long as a map's value.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_ref(attr), size) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(RawFd::try_from(result).expect("bpf(2) returns an int"))
}
