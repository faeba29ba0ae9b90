//! The part of libbpf that loads a congestion control and writes its map. The library is Debian's,
//! 1.1. It is not bound as a whole: fourteen functions and one struct suffice.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::{self, NonNull};

// include/uapi/linux/bpf.h.
const BPF_MAP_TYPE_STRUCT_OPS: u32 = 26;

#[repr(C)]
struct RawObject([u8; 0]);
#[repr(C)]
struct RawMap([u8; 0]);
#[repr(C)]
struct RawLink([u8; 0]);

/// The beginning of `struct bpf_map_info`.
#[derive(Default)]
#[repr(C)]
struct MapInfo {
    kind: u32,
    id: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    map_flags: u32,
    name: [u8; 16],
}

// bpf/libbpf.h and bpf/bpf.h of libbpf 1.1. A pointer that is null and a number that is negative
// are errors, and errno says which.
unsafe extern "C" {
    fn bpf_object__open_mem(
        bytes: *const c_void,
        size: usize,
        options: *const c_void,
    ) -> *mut RawObject;
    fn bpf_object__load(object: *mut RawObject) -> c_int;
    fn bpf_object__close(object: *mut RawObject);
    fn bpf_object__find_map_by_name(object: *const RawObject, name: *const c_char) -> *mut RawMap;
    fn bpf_map__attach_struct_ops(map: *const RawMap) -> *mut RawLink;
    fn bpf_map__fd(map: *const RawMap) -> c_int;
    fn bpf_map__key_size(map: *const RawMap) -> u32;
    fn bpf_map__value_size(map: *const RawMap) -> u32;
    fn bpf_link__destroy(link: *mut RawLink) -> c_int;
    fn bpf_map_update_elem(
        map: c_int,
        key: *const c_void,
        value: *const c_void,
        flags: u64,
    ) -> c_int;
    fn bpf_map_delete_elem(map: c_int, key: *const c_void) -> c_int;
    fn bpf_map_get_next_id(after: u32, next: *mut u32) -> c_int;
    fn bpf_map_get_fd_by_id(id: u32) -> c_int;
    fn bpf_obj_get_info_by_fd(fd: c_int, info: *mut c_void, length: *mut u32) -> c_int;
}

/// A program in the kernel, with its maps.
#[derive(Debug)]
pub(crate) struct Object(NonNull<RawObject>);

/// A congestion control that connections may choose, for as long as this lives. To be dropped
/// before its object, whose descriptor it uses.
#[derive(Debug)]
pub(crate) struct Registered(NonNull<RawLink>);

impl Object {
    /// Loads an object file; the kernel verifies it. The verifier's messages go to standard error.
    pub(crate) fn load(file: &[u8]) -> io::Result<Self> {
        // SAFETY: libbpf reads `file` only during this call, and null means no options.
        let object = unsafe { bpf_object__open_mem(file.as_ptr().cast(), file.len(), ptr::null()) };
        let object = Self(NonNull::new(object).ok_or_else(io::Error::last_os_error)?);
        // SAFETY: `object` is open, and not loaded yet.
        check(unsafe { bpf_object__load(object.0.as_ptr()) })?;
        Ok(object)
    }

    /// Registers the congestion control that this map describes.
    pub(crate) fn register(&self, map: &CStr) -> io::Result<Registered> {
        let map = self.map(map)?;
        // SAFETY: `map` belongs to `self`, which is loaded.
        let link = unsafe { bpf_map__attach_struct_ops(map.as_ptr()) };
        NonNull::new(link).map(Registered).ok_or_else(io::Error::last_os_error)
    }

    /// Sets an entry of a map.
    pub(crate) fn set(&self, map: &CStr, key: &[u8], value: &[u8]) -> io::Result<()> {
        let map = self.map_for(map, key)?;
        // SAFETY: the map belongs to `self`, which is loaded.
        let (fd, length) = unsafe { (bpf_map__fd(map), bpf_map__value_size(map)) };
        assert_eq!(usize::try_from(length), Ok(value.len()), "what the program's source says");
        // SAFETY: the kernel reads as many bytes as were just compared.
        check(unsafe { bpf_map_update_elem(fd, key.as_ptr().cast(), value.as_ptr().cast(), 0) })
    }

    /// Removes an entry, which may not be there.
    pub(crate) fn unset(&self, map: &CStr, key: &[u8]) -> io::Result<()> {
        let map = self.map_for(map, key)?;
        // SAFETY: as above; `map_for` compared the length of the key.
        match check(unsafe { bpf_map_delete_elem(bpf_map__fd(map), key.as_ptr().cast()) }) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            result => result,
        }
    }

    /// The map, whose keys are as long as this one.
    fn map_for(&self, map: &CStr, key: &[u8]) -> io::Result<*const RawMap> {
        let map = self.map(map)?.as_ptr().cast_const();
        // SAFETY: the map belongs to `self`.
        let length = unsafe { bpf_map__key_size(map) };
        assert_eq!(usize::try_from(length), Ok(key.len()), "what the program's source says");
        Ok(map)
    }

    fn map(&self, name: &CStr) -> io::Result<NonNull<RawMap>> {
        // SAFETY: `self` is open; `name` ends with a NUL.
        let map = unsafe { bpf_object__find_map_by_name(self.0.as_ptr(), name.as_ptr()) };
        NonNull::new(map).ok_or_else(io::Error::last_os_error)
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        // SAFETY: nobody else closes it, and nothing derived from it outlives it: descriptors are
        // only used inside calls, and a registration lives in the kernel.
        unsafe { bpf_object__close(self.0.as_ptr()) }
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // SAFETY: nobody else destroys it. Connections that use it keep it in the kernel.
        unsafe { bpf_link__destroy(self.0.as_ptr()) };
    }
}

/// Takes back the congestion control of this name that somebody who is gone has registered.
pub(crate) fn unregister(name: &str) -> io::Result<()> {
    let mut id = 0;
    loop {
        // SAFETY: `id` is writable.
        match check(unsafe { bpf_map_get_next_id(id, &raw mut id) }) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            result => result?,
        }
        // SAFETY: this only returns a number.
        let fd = unsafe { bpf_map_get_fd_by_id(id) };
        if fd < 0 {
            continue; // it went meanwhile
        }
        // SAFETY: the kernel has just opened it for us.
        let map = unsafe { OwnedFd::from_raw_fd(fd) };
        let mut info = MapInfo::default();
        let mut length = u32::try_from(size_of::<MapInfo>()).expect("a small struct");
        let place = ptr::from_mut(&mut info).cast();
        // SAFETY: `info` is writable and `length` bytes long; any bytes are a value of it.
        check(unsafe { bpf_obj_get_info_by_fd(map.as_raw_fd(), place, &raw mut length) })?;
        let its_name = info.name.split(|b| *b == 0).next().unwrap_or_default();
        if info.kind == BPF_MAP_TYPE_STRUCT_OPS && its_name == name.as_bytes() {
            let first = 0_u32;
            // SAFETY: a struct_ops map has keys of four bytes. It fails for one that was taken
            // back already, and is only there for the connections that use it.
            unsafe { bpf_map_delete_elem(map.as_raw_fd(), (&raw const first).cast()) };
        }
    }
}

fn check(result: c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
