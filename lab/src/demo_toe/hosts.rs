//! The two hosts and their guests.

use std::fmt::Write as _;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};

use anyhow::{Context, Result, bail, ensure};
use nightporter_guest::bootline::Nic;
use nightporter_guest::control::Command;
use nightporter_guest::peer::{Ask, Told};

use super::ends::{End, InGuest, OnHost};
use super::{Case, PORT, Path, ROUND_TRIPS, Sample, transfer};
use crate::daemon::Daemon;
use crate::host::{self, guest_nic};
use crate::image::Image;
use crate::peer::Sockets;
use crate::vmm::{Attach, Guest, Places, Spec, Vmm};
use crate::world::{BOOT_LIMIT, guest_name};

/// The guests' subnet, on the overlay.
const SUBNET: u8 = 4;
/// Each of its two programs has what it sends and what it has got.
const GUEST_MEMORY_MIB: u32 = 512;
const ADDRESSES: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 78, 0, 1), Ipv4Addr::new(10, 78, 0, 2)];
/// Whose host is which.
const HOST_OF: [usize; 3] = [0, 0, 1];

/// Everything that runs. Dropping it kills it.
pub(super) struct Hosts {
    /// Dropped first: a VMM whose back-end goes away only complains.
    guests: Vec<Guest>,
    daemons: Vec<Daemon>,
    on_hosts: [OnHost; 2],
    transfers: u64,
}

/// Guest `guest`'s one NIC.
fn nic(guest: usize) -> Nic {
    guest_nic(u8::try_from(guest).expect("a handful"), SUBNET)
}

fn name(guest: usize) -> String {
    guest_name(u8::try_from(guest).expect("a handful"))
}

impl Hosts {
    /// Moves the calling thread from host to host, and boots the guests.
    pub(super) fn start(vmm: Vmm, image: &Image, places: Places<'_>) -> Result<Self> {
        let machines = host::cabled(ADDRESSES)?;
        let mut daemons = Vec::new();
        for (at, machine) in machines.iter().enumerate() {
            machine.move_in();
            let dir = places.sockets.join(format!("host{at}"));
            fs::create_dir(&dir).with_context(|| format!("creating {}", dir.display()))?;
            let text = configuration(at, vmm, &dir.to_string_lossy());
            let vms = (0..HOST_OF.len()).filter(|&guest| HOST_OF[guest] == at).map(name);
            let files = vms.flat_map(|vm| [format!("{vm}.sock"), format!("{vm}-toe.sock")]);
            let log = places.logs.join(format!("nightporterd{at}.log"));
            daemons.push(Daemon::start_as(&text, &files.collect::<Vec<_>>(), &dir, &log)?);
        }
        let on_hosts = [OnHost::start(&machines[0])?, OnHost::start(&machines[1])?];
        let mut hosts = Self { guests: Vec::new(), daemons, on_hosts, transfers: 0 };
        for (guest, &at) in HOST_OF.iter().enumerate() {
            machines[at].move_in();
            let daemon = &hosts.daemons[at];
            let name = name(guest);
            let attach = Attach::VhostUser(daemon.socket(&name));
            let toe = Some(daemon.toe_socket(&name));
            let (nics, neighbours) = (vec![(nic(guest), attach)], Vec::new());
            let spec = Spec { name, vmm, memory_mib: GUEST_MEMORY_MIB, nics, neighbours, toe };
            hosts.guests.push(Guest::start(&spec, image, places)?);
        }
        for guest in &mut hosts.guests {
            guest.wait_ready(BOOT_LIMIT)?;
            if vmm == Vmm::Uml {
                // See `World::start`.
                guest.call(&Command::LoadStart { loops_per_ms: 100, percent: 1 })?;
            }
            for sockets in [Sockets::Native, Sockets::Toe] {
                guest.start_peer(sockets, false)?;
            }
        }
        hosts.listen()?;
        Ok(hosts)
    }

    /// All who are connected to listen, once and for all.
    fn listen(&mut self) -> Result<()> {
        let on_host = SocketAddr::from((ADDRESSES[1], PORT));
        let listens = |end: &mut dyn End, at| match end.ask(Ask::Listen { at })? {
            Told::At { .. } => Ok(()),
            other => bail!("listen() at {at} gave {other:?}"),
        };
        listens(&mut self.on_hosts[1], on_host)?;
        for (index, guest) in self.guests.iter_mut().enumerate().skip(1) {
            for sockets in [Sockets::Native, Sockets::Toe] {
                listens(&mut InGuest { guest: &mut *guest, sockets }, at(index, sockets))?;
            }
        }
        Ok(())
    }

    /// One transfer, of bytes that no other had.
    pub(super) fn sample(&mut self, path: Path, case: Case, bytes: usize) -> Result<Sample> {
        self.transfers += 1;
        let seed = self.transfers;
        let (server, sockets) = match path {
            Path::ToeTcp => (2, Sockets::Toe),
            Path::ToeLocal => (1, Sockets::Toe),
            Path::Overlay => (2, Sockets::Native),
            Path::Switch => (1, Sockets::Native),
            Path::Host => {
                let [client, server] = &mut self.on_hosts;
                let to = (ADDRESSES[1], PORT).into();
                return transfer([client, server], to, (case, bytes, seed), &|end| end.cpu());
            }
        };
        let before = self.daemons[HOST_OF[server]].toe_bytes_to_guest(&name(server))?;
        let daemon = &self.daemons[HOST_OF[server]];
        let Ok([first, second]) = self.guests.get_disjoint_mut([0, server]) else {
            bail!("there are three guests");
        };
        let mut client = InGuest { guest: first, sockets };
        let mut receiver = InGuest { guest: second, sockets };
        let cpu = |end: &dyn End| Ok(end.cpu()? + daemon.cpu_use()?.time);
        let to = at(server, sockets);
        let sample = transfer([&mut client, &mut receiver], to, (case, bytes, seed), &cpu)?;
        let after = self.daemons[HOST_OF[server]].toe_bytes_to_guest(&name(server))?;
        let least = if case == Case::RoundTrip { ROUND_TRIPS } else { bytes };
        let went_by_toe = after - before >= least as u64;
        ensure!(went_by_toe == (sockets == Sockets::Toe), "{} bytes went by TOE", after - before);
        Ok(sample)
    }

    /// Kills the guests and stops the daemons gracefully.
    pub(super) fn stop(self) -> Result<()> {
        drop(self.guests);
        self.daemons.into_iter().try_for_each(Daemon::stop)
    }
}

/// Where a guest listens.
fn at(guest: usize, sockets: Sockets) -> SocketAddr {
    let port = PORT + u16::from(sockets == Sockets::Toe);
    (nic(guest).address, port).into()
}

fn configuration(at: usize, vmm: Vmm, dir: &str) -> String {
    let [local, peer] = [ADDRESSES[at], ADDRESSES[1 - at]];
    let mut text = format!(
        "[daemon]\ncontrol = \"{dir}/control.sock\"\narena = \"{dir}/arena\"\nmetrics = \"off\"\n\
         drain_timeout_s = 2\nlog = \"info\"\n\n\
         [toe]\n\n\
         [[overlay]]\nname = \"between\"\nvni = 42\nlocal = \"{local}\"\npeers = [\"{peer}\"]\n"
    );
    for (guest, host) in HOST_OF.iter().map(|&at| ADDRESSES[at]).enumerate() {
        let Nic { mac, address, .. } = nic(guest);
        let _ = write!(
            text,
            "\n[[station]]\nvni = 42\nmac = \"{mac}\"\nhost = \"{host}\"\nips = [\"{address}\"]\n"
        );
    }
    // User-mode Linux has its memory in a temporary file.
    let unsealed = vmm == Vmm::Uml;
    for guest in (0..HOST_OF.len()).filter(|&guest| HOST_OF[guest] == at) {
        let (name, Nic { mac, address, .. }) = (name(guest), nic(guest));
        let _ = write!(
            text,
            "\n[[vm]]\nname = \"{name}\"\nsocket = \"{dir}/{name}.sock\"\nmac = \"{mac}\"\n\
             ips = [\"{address}\"]\nallow_unsealed_memory = {unsealed}\ntoe = true\n"
        );
    }
    text
}
