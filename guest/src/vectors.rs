//! Whether programs of this guest keep their vector registers: while the kernel gives them a page,
//! while another thread runs, and while a timer interrupts them.
//!
//! User-mode Linux sets all registers of a program whenever it lets the program go on, and on some
//! hosts it cannot set all of them. A program then reads zeros, or the registers of another thread.

use std::arch::asm;
use std::arch::x86_64::__cpuid;
use std::fs;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::ptr::NonNull;
use std::thread;

use anyhow::{Context, Result, anyhow, ensure};
use libc::c_void;
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, munmap};

/// Of x86-64 Linux. It is more than all registers of a kind have.
const PAGE_BYTES: usize = 4096;

/// How often a thread of [`strain`] yields with its registers loaded, and how many turns of an
/// empty loop it works then: less than a millisecond.
const YIELDS: u64 = 3;
const SPINS: u64 = 300_000;

/// Kinds of vector registers, by what programs copy with them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Of AVX: 16 of 32 bytes.
    Ymm,
    /// Of AVX-512: 32 of 64 bytes.
    Zmm,
}

impl Kind {
    /// Those that this CPU has and its kernel lets programs use. (16 bytes are part of x86-64.)
    fn all() -> impl DoubleEndedIterator<Item = Self> {
        let has_ymm = is_x86_feature_detected!("avx").then_some(Self::Ymm);
        let has_zmm = is_x86_feature_detected!("avx512f").then_some(Self::Zmm);
        has_ymm.into_iter().chain(has_zmm)
    }

    const fn bytes(self) -> usize {
        match self {
            Self::Ymm => 32,
            Self::Zmm => 64,
        }
    }

    const fn all_bytes(self) -> usize {
        match self {
            Self::Ymm => 16 * 32,
            Self::Zmm => 32 * 64,
        }
    }

    /// Loads all registers of this kind from `from`, yields so often, works for so long, and stores
    /// the registers to `to`.
    fn keep(self, from: &[u8; PAGE_BYTES], to: &mut Page, yields: u64, spins: u64) {
        let to: *mut c_void = to.at.as_ptr();
        // SAFETY: the CPU has these registers (`all`). They are loaded from bytes that a shared
        // reference has, and stored to bytes of a page that is ours alone; a page has more than
        // all of them. sched_yield (24) takes nothing and changes rax, rcx and r11 only.
        unsafe {
            match self {
                Self::Ymm => asm!(
                    ".irp n,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15",
                    "vmovdqu ymm\\n, [rdi + \\n*32]",
                    ".endr",
                    "2: sub r8, 1", "jc 3f", "mov eax, 24", "syscall", "jmp 2b",
                    "3: sub r9, 1", "jnc 3b",
                    ".irp n,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15",
                    "vmovdqu [rsi + \\n*32], ymm\\n",
                    ".endr",
                    "vzeroupper",
                    in("rdi") from, in("rsi") to, inout("r8") yields => _, inout("r9") spins => _,
                    clobber_abi("sysv64"), options(nostack),
                ),
                Self::Zmm => asm!(
                    ".irp n,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15",
                    "vmovdqu64 zmm\\n, [rdi + \\n*64]",
                    ".endr",
                    ".irp n,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31",
                    "vmovdqu64 zmm\\n, [rdi + \\n*64]",
                    ".endr",
                    "2: sub r8, 1", "jc 3f", "mov eax, 24", "syscall", "jmp 2b",
                    "3: sub r9, 1", "jnc 3b",
                    ".irp n,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15",
                    "vmovdqu64 [rsi + \\n*64], zmm\\n",
                    ".endr",
                    ".irp n,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31",
                    "vmovdqu64 [rsi + \\n*64], zmm\\n",
                    ".endr",
                    "vzeroupper",
                    in("rdi") from, in("rsi") to, inout("r8") yields => _, inout("r9") spins => _,
                    clobber_abi("sysv64"), options(nostack),
                ),
            }
        }
    }

    /// Fails if a register's value has changed.
    fn compared(self, loaded: &[u8; PAGE_BYTES], kept: &[u8; PAGE_BYTES]) -> Result<()> {
        let Some(at) = (0..self.all_bytes()).find(|&at| loaded[at] != kept[at]) else {
            return Ok(());
        };
        let register = at / self.bytes();
        let all = register * self.bytes()..(register + 1) * self.bytes();
        let (loaded, kept) = (&loaded[all.clone()], &kept[all]);
        Err(anyhow!("{self:?}{register} has changed from {loaded:02x?} to {kept:02x?}"))
    }
}

/// A page that the kernel has not given yet.
struct Page {
    at: NonNull<c_void>,
}

impl Page {
    fn untouched() -> Result<Self> {
        let length = NonZeroUsize::new(PAGE_BYTES).context("not zero")?;
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: memory of its own, anywhere.
        let at = unsafe { mmap_anonymous(None, length, protection, MapFlags::MAP_PRIVATE) };
        Ok(Self { at: at.context("mapping a page")? })
    }

    /// The page; of one that is untouched it is the kernel's page of zeros, which is copied when
    /// somebody writes.
    fn read(&self) -> &[u8; PAGE_BYTES] {
        // SAFETY: the page is mapped, and has this many bytes; any of them is a value.
        unsafe { self.at.cast().as_ref() }
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: mapped by `untouched`; `read` has borrowed `self`.
        let unmapped = unsafe { munmap(self.at, PAGE_BYTES) };
        debug_assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}

/// Copies by each kind of register to a page that the kernel has yet to give, as memcpy() does.
pub(crate) fn check() -> Result<()> {
    let loaded = pattern(1);
    for kind in Kind::all() {
        let mut page = Page::untouched()?;
        kind.keep(&loaded, &mut page, 0, 0);
        let kept = kind.compared(&loaded, page.read());
        kept.with_context(|| format!("programs lose vector registers with {}", machine()))?;
    }
    Ok(())
}

/// The same many times in two threads that give their CPU to each other, and lose it by time, with
/// the widest registers loaded. The page is untouched or copied on write.
pub(crate) fn strain(rounds: u32) -> Result<()> {
    let kind = Kind::all().next_back().context("this CPU has no AVX")?;
    let thread = |threads: Range<u8>| -> Result<()> {
        for round in 0..rounds {
            let loaded = pattern(threads.start + u8::try_from(round % 100)?);
            let mut page = Page::untouched()?;
            if round % 2 == 1 {
                ensure!(page.read().iter().all(|&byte| byte == 0), "a new page is not zero");
            }
            kind.keep(&loaded, &mut page, YIELDS, SPINS);
            let kept = kind.compared(&loaded, page.read());
            kept.with_context(|| format!("round {round}, with {}", machine()))?;
        }
        Ok(())
    };
    thread::scope(|scope| {
        let threads = [0..100, 100..200].map(|seeds| scope.spawn(|| thread(seeds)));
        threads.into_iter().try_for_each(|thread| thread.join().expect("does not panic"))
    })
}

/// No two registers of a kind have the same bytes, nor has any half of one, and none is zero.
fn pattern(seed: u8) -> [u8; PAGE_BYTES] {
    std::array::from_fn(|at| {
        let [low, high, ..] = at.to_le_bytes();
        low.wrapping_mul(7) ^ high.wrapping_mul(31) ^ seed | 1
    })
}

/// The CPU and the VMM.
fn machine() -> String {
    let brand: Vec<u8> = (0x8000_0002..=0x8000_0004)
        .map(__cpuid)
        .flat_map(|part| [part.eax, part.ebx, part.ecx, part.edx])
        .flat_map(u32::to_le_bytes)
        .take_while(|&byte| byte != 0)
        .collect();
    let brand = String::from_utf8_lossy(&brand);
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    let release = read("/proc/sys/kernel/osrelease");
    let vmm = if read("/proc/cpuinfo").contains("User Mode Linux") {
        format!("user-mode Linux {release}")
    } else {
        format!("VMM {:?}", read("/sys/class/dmi/id/sys_vendor").trim())
    };
    format!("CPU {:?} and {}", brand.trim(), vmm.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_keeps_vector_registers() {
        check().expect("kept");
        if Kind::all().next().is_some() {
            strain(20).expect("kept");
        }
    }

    #[test]
    fn a_register_that_lost_its_upper_half_is_named() {
        let loaded = pattern(9);
        let mut kept = loaded;
        assert!(Kind::Ymm.compared(&loaded, &kept).is_ok());
        kept[3 * 32 + 16..4 * 32].fill(0);
        let error = Kind::Ymm.compared(&loaded, &kept).expect_err("it has changed").to_string();
        assert!(error.starts_with("Ymm3 has changed from [") && error.ends_with(" 00]"), "{error}");
    }

    #[test]
    fn the_machine_is_named() {
        let machine = machine();
        assert!(machine.starts_with("CPU \"") && machine.contains("VMM"), "{machine}");
    }
}
