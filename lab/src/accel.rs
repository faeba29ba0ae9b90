//! Whether KVM really works here. `/dev/kvm` may open while guests hang after "Booting from ROM" (a
//! nested host without hardware virtualisation), so the answer is a boot with a time limit.

use std::fmt;
use std::fs::OpenOptions;
use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use clap::ValueEnum;
use serde::Serialize;

use crate::image::{Image, log_dir};
use crate::rundir::RunDir;
use crate::vmm::{Guest, Places, Spec, Vmm};

/// A guest under working KVM is up in about a second; one that takes this long never comes.
const PROBE_LIMIT: Duration = Duration::from_secs(8);

/// How QEMU runs guest code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Accel {
    /// Hardware virtualisation.
    Kvm,
    /// Translation.
    Tcg,
}

impl Accel {
    /// The one that was asked for, or what [`Self::probe`] finds.
    ///
    /// # Errors
    /// Those of it.
    pub fn or_probe(asked: Option<Self>, image: &Image) -> Result<Self> {
        asked.map_or_else(|| Self::probe(image), Ok)
    }

    /// KVM if a guest boots under it here, TCG otherwise. Takes up to 8 seconds.
    ///
    /// # Errors
    /// There is no room for its files.
    pub fn probe(image: &Image) -> Result<Self> {
        if OpenOptions::new().read(true).write(true).open("/dev/kvm").is_err() {
            return Ok(Self::Tcg);
        }
        let run_dir = RunDir::create()?;
        let places = Places { sockets: run_dir.path(), logs: &log_dir("probe")? };
        let spec = Spec {
            name: "kvm-probe".to_owned(),
            vmm: Vmm::Qemu(Self::Kvm),
            memory_mib: 128,
            nics: Vec::new(),
            neighbours: Vec::new(),
            toe: None,
            rx_ring: None,
            moves: None,
        };
        let up = Guest::start(&spec, image, places).and_then(|mut g| g.wait_ready(PROBE_LIMIT));
        Ok(if up.is_ok() { Self::Kvm } else { Self::Tcg })
    }

    /// QEMU's options for it.
    pub(crate) fn qemu_options(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::Kvm => &[("-accel", "kvm"), ("-cpu", "host")],
            // Without tb-size every guest may take a gigabyte for translated code.
            Self::Tcg => &[("-accel", "tcg,thread=multi,tb-size=64")],
        }
    }

    /// Whether a tap's data path runs in the host kernel. Only KVM takes its interrupts.
    pub(crate) fn has_vhost_net(self) -> bool {
        self == Self::Kvm && Path::new("/dev/vhost-net").exists()
    }
}

impl fmt::Display for Accel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        })
    }
}
