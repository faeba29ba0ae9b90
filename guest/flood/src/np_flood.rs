//! The congestion control `np_flood` (`bpf/np_flood.bpf.c`): connections that use it flood, each
//! for itself, and routes stay as they are.

use anyhow::Result;
#[cfg(not(np_flood))]
use anyhow::bail;

use crate::beats::Beats;

/// Its name, for setsockopt(TCP_CONGESTION).
pub const NAME: &str = "np_flood";

/// Whether it can be chosen now.
///
/// # Errors
/// The kernel's list cannot be read.
pub fn is_registered() -> Result<bool> {
    let list = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_available_congestion_control")?;
    Ok(list.split_whitespace().any(|name| name == NAME))
}

#[cfg(not(np_flood))]
pub use absent::NpFlood;
#[cfg(np_flood)]
pub use present::NpFlood;

#[cfg(np_flood)]
mod present {
    use std::ffi::CStr;
    use std::io::ErrorKind;

    use anyhow::Context;
    use nightporter_core::time::Instant;

    use super::{Beats, NAME, Result};
    use crate::beats::Nic;
    use crate::libbpf::{Object, Registered, unregister};
    use crate::record::namespace;

    const FILE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/np_flood.bpf.o"));
    const OPS: &CStr = c"np_flood";
    const BEATS: &CStr = c"np_beats";

    /// Registered as long as it lives. Connections that use it keep it afterwards, and then it is
    /// CUBIC, because heartbeats are no longer written.
    #[derive(Debug)]
    pub struct NpFlood {
        // Dropped in this order: unregistering needs the map's descriptor.
        _registered: Registered,
        object: Object,
        netns: u32,
        /// Interfaces with a heartbeat in the map, and until when it is fresh.
        told: Vec<(Nic, Instant)>,
    }

    impl NpFlood {
        /// Loads and registers it.
        ///
        /// # Errors
        /// The kernel has no BTF, no struct_ops, or refuses the program.
        pub fn load() -> Result<Self> {
            let object = Object::load(FILE).context(
                "loading np_flood: the kernel must have BTF (/sys/kernel/btf/vmlinux) and CUBIC",
            )?;
            let registered = match object.register(OPS) {
                // A watcher that was killed could not take its own back.
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                    unregister(NAME).and_then(|()| object.register(OPS))
                }
                result => result,
            };
            let registered = registered.context("registering np_flood")?;
            let netns = u32::try_from(namespace()?)?;
            Ok(Self { _registered: registered, object, netns, told: Vec::new() })
        }

        /// Tells the program what was heard.
        ///
        /// # Errors
        /// The map cannot be written.
        pub fn tell(&mut self, beats: &Beats, segments: u32) -> Result<()> {
            let heard: Vec<_> = beats.live().map(|(nic, beat)| (nic, beat.until)).collect();
            if heard == self.told {
                return Ok(());
            }
            for (nic, _) in self.told.iter().filter(|(nic, _)| !heard.iter().any(|h| h.0 == *nic)) {
                self.object.unset(BEATS, &self.link(*nic))?;
            }
            for (nic, beat) in beats.live() {
                // `struct beat` of the program: until_ns, epoch, segments.
                let words = [beat.until.as_nanos(), beat.epoch.get(), segments.into()];
                self.object.set(BEATS, &self.link(nic), &words.map(u64::to_ne_bytes).concat())?;
            }
            self.told = heard;
            Ok(())
        }

        /// `struct link` of the program: netns, ifindex.
        fn link(&self, nic: Nic) -> Vec<u8> {
            [self.netns, nic].map(u32::to_ne_bytes).concat()
        }
    }
}

#[cfg(not(np_flood))]
mod absent {
    use super::{Beats, Result, bail};

    /// This tool was built without it.
    #[derive(Debug)]
    pub struct NpFlood(std::convert::Infallible);

    impl NpFlood {
        /// # Errors
        /// Always.
        pub fn load() -> Result<Self> {
            bail!(
                "this nightporter-guest was built without np_flood: build it where clang, \
                 libbpf-dev, libelf-dev and zlib1g-dev are installed"
            )
        }

        /// Never called.
        ///
        /// # Errors
        /// None.
        pub fn tell(&mut self, _: &Beats, _: u32) -> Result<()> {
            match self.0 {}
        }
    }
}
