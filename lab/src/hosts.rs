//! Two hosts, each with a daemon, and guests of both with sockets over their hosts: the world of
//! the virtual TOE's tests and demo.
//!
//! ```text
//!   host namespace 1                                   host namespace 2
//!   ┌───────────────────────────────┐                  ┌──────────────────────┐
//!   │ guest 0 ╗                     │                  │                      │
//!   │         ╠═ nightporterd ══════╪═ veth: 10.78.0 ══╪═ nightporterd ═ guest 2
//!   │ guest 1 ╝                     │                  │                      │
//!   └───────────────────────────────┘                  └──────────────────────┘
//! ```

use std::fmt::Write as _;
use std::fs;
use std::net::Ipv4Addr;

use anyhow::{Context, Result};
use nightporter_guest::bootline::Nic;
use nightporter_guest::control::Command;

use crate::daemon::Daemon;
use crate::host::{self, Remote, guest_nic};
use crate::image::Image;
use crate::vmm::{Attach, Guest, Places, Spec, Vmm};
use crate::world::{BOOT_LIMIT, guest_name};

/// The guests' subnet, on the overlay.
const SUBNET: u8 = 4;
/// Addresses of the hosts.
pub const ADDRESSES: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 78, 0, 1), Ipv4Addr::new(10, 78, 0, 2)];
/// The host of each guest.
pub const HOST_OF: [usize; 3] = [0, 0, 1];

/// Everything that runs. Dropping it kills it.
#[derive(Debug)]
pub struct Hosts {
    /// Dropped first: a VMM whose back-end goes away only complains.
    pub guests: Vec<Guest>,
    /// One of each host.
    pub daemons: Vec<Daemon>,
    /// The hosts' namespaces.
    pub machines: [Remote; 2],
    /// The host of each guest.
    host_of: Vec<usize>,
}

/// Guest `guest`'s one NIC.
#[must_use]
pub fn nic(guest: usize) -> Nic {
    guest_nic(u8::try_from(guest).expect("a handful"), SUBNET)
}

/// Its name, also of its port.
#[must_use]
pub fn name(guest: usize) -> String {
    guest_name(u8::try_from(guest).expect("a handful"))
}

impl Hosts {
    /// Moves the calling thread from host to host, and boots the guests.
    ///
    /// # Errors
    /// Whatever did not start; the message holds the end of its log.
    pub fn start(vmm: Vmm, image: &Image, memory_mib: u32, places: Places<'_>) -> Result<Self> {
        Self::start_on(&HOST_OF, HOST_OF.len(), vmm, image, memory_mib, places)
    }

    /// Likewise, with a VM on each of these hosts, of which the first `booted` get a guest.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_on(
        host_of: &[usize],
        booted: usize,
        vmm: Vmm,
        image: &Image,
        memory_mib: u32,
        places: Places<'_>,
    ) -> Result<Self> {
        let machines = host::cabled(ADDRESSES)?;
        let mut daemons = Vec::new();
        for (at, machine) in machines.iter().enumerate() {
            machine.move_in();
            let dir = places.sockets.join(format!("host{at}"));
            fs::create_dir(&dir).with_context(|| format!("creating {}", dir.display()))?;
            let text = configuration(host_of, at, vmm, &dir.to_string_lossy());
            let vms = (0..host_of.len()).filter(|&guest| host_of[guest] == at).map(name);
            let files = vms.flat_map(|vm| [format!("{vm}.sock"), format!("{vm}-toe.sock")]);
            let log = places.logs.join(format!("nightporterd{at}.log"));
            daemons.push(Daemon::start_as(&text, &files.collect::<Vec<_>>(), &dir, &log)?);
        }
        let mut hosts = Self { guests: Vec::new(), daemons, machines, host_of: host_of.to_vec() };
        for (guest, &at) in host_of.iter().enumerate().take(booted) {
            hosts.machines[at].move_in();
            let daemon = &hosts.daemons[at];
            let name = name(guest);
            let attach = Attach::VhostUser(daemon.socket(&name));
            let toe = Some(daemon.toe_socket(&name));
            let (nics, neighbours) = (vec![(nic(guest), attach)], Vec::new());
            let (rx_ring, moves) = (None, None);
            let spec = Spec { name, vmm, memory_mib, nics, neighbours, toe, rx_ring, moves };
            hosts.guests.push(Guest::start(&spec, image, places)?);
        }
        for guest in &mut hosts.guests {
            guest.wait_ready(BOOT_LIMIT)?;
            if vmm == Vmm::Uml {
                // See `World::start`.
                guest.call(&Command::LoadStart { loops_per_ms: 100, percent: 1 })?;
            }
        }
        Ok(hosts)
    }

    /// The daemon of a guest's host.
    pub fn daemon_of(&mut self, guest: usize) -> &mut Daemon {
        &mut self.daemons[self.host_of[guest]]
    }

    /// Bytes of streams that a guest was given over its socket device.
    ///
    /// # Errors
    /// Those of [`Daemon::toe_bytes_to_guest`].
    pub fn given(&mut self, guest: usize) -> Result<u64> {
        self.daemon_of(guest).toe_bytes_to_guest(&name(guest))
    }

    /// Kills the guests and stops the daemons gracefully.
    ///
    /// # Errors
    /// A daemon did not end well.
    pub fn stop(self) -> Result<()> {
        drop(self.guests);
        self.daemons.into_iter().try_for_each(Daemon::stop)
    }
}

fn configuration(host_of: &[usize], at: usize, vmm: Vmm, dir: &str) -> String {
    let [local, peer] = [ADDRESSES[at], ADDRESSES[1 - at]];
    let mut text = format!(
        "[daemon]\ncontrol = \"{dir}/control.sock\"\narena = \"{dir}/arena\"\nmetrics = \"off\"\n\
         drain_timeout_s = 2\nlog = \"info\"\n\n\
         [toe]\n\n\
         [[overlay]]\nname = \"between\"\nvni = 42\nlocal = \"{local}\"\npeers = [\"{peer}\"]\n"
    );
    for (guest, host) in host_of.iter().map(|&at| ADDRESSES[at]).enumerate() {
        let Nic { mac, address, .. } = nic(guest);
        let _ = write!(
            text,
            "\n[[station]]\nvni = 42\nmac = \"{mac}\"\nhost = \"{host}\"\nips = [\"{address}\"]\n"
        );
    }
    // User-mode Linux has its memory in a temporary file.
    let unsealed = vmm == Vmm::Uml;
    for guest in (0..host_of.len()).filter(|&guest| host_of[guest] == at) {
        let (name, Nic { mac, address, .. }) = (name(guest), nic(guest));
        let _ = write!(
            text,
            "\n[[vm]]\nname = \"{name}\"\nsocket = \"{dir}/{name}.sock\"\nmac = \"{mac}\"\n\
             ips = [\"{address}\"]\nallow_unsealed_memory = {unsealed}\ntoe = true\n"
        );
    }
    text
}
