//! The two hosts and their guests, ready to send.

use std::net::SocketAddr;

use anyhow::{Result, bail, ensure};
use nightporter_guest::peer::{Answer, Ask};

use super::encrypted::{self, Encrypted};
use super::ends::{End, InGuest, InThread};
use super::{Case, PORT, Path, ROUND_TRIPS, Sample, transfer};
use crate::hosts::{ADDRESSES, Hosts, name, nic};
use crate::image::Image;
use crate::peer::Sockets;
use crate::vmm::{Places, Vmm};

/// The host of each: three guests, and the VMs of two drivers without guests.
const HOST_OF: [usize; 5] = [0, 0, 1, 0, 1];
const DRIVERS: [usize; 2] = [3, 4];
/// Each of its two programs holds its data to send and its received data.
const GUEST_MEMORY_MIB: u32 = 512;

/// Both hosts and their guests, with programs that send and receive on each.
pub(super) struct Ready {
    hosts: Hosts,
    on_hosts: [InThread; 2],
    drivers: [InThread; 2],
    encrypted: Encrypted,
    transfers: u64,
}

impl Ready {
    /// Moves the calling thread from host to host, and boots the guests.
    pub(super) fn start(vmm: Vmm, image: &Image, places: Places<'_>) -> Result<Self> {
        let mut hosts =
            Hosts::start_on(&HOST_OF, DRIVERS[0], vmm, image, GUEST_MEMORY_MIB, places)?;
        for guest in &mut hosts.guests {
            for sockets in [Sockets::Native, Sockets::Toe] {
                guest.start_peer(sockets, false)?;
            }
        }
        let [first, second] = &hosts.machines;
        let on_hosts = [InThread::on(first)?, InThread::on(second)?];
        let drive =
            |vm: usize| InThread::driving(&hosts.daemons[HOST_OF[vm]].toe_socket(&name(vm)));
        let drivers = [drive(DRIVERS[0])?, drive(DRIVERS[1])?];
        let encrypted = Encrypted::start(&hosts, places)?;
        let mut ready = Self { hosts, on_hosts, drivers, encrypted, transfers: 0 };
        ready.listen()?;
        Ok(ready)
    }

    /// All who are connected to listen, once and for all.
    fn listen(&mut self) -> Result<()> {
        let on_host = SocketAddr::from((ADDRESSES[1], PORT));
        let listens = |end: &mut dyn End, at| match end.ask(Ask::Listen { at })? {
            Answer::At { .. } => Ok(()),
            other => bail!("listen() at {at} gave {other:?}"),
        };
        listens(&mut self.on_hosts[1], on_host)?;
        listens(&mut self.drivers[1], at(DRIVERS[1], Sockets::Toe))?;
        for (index, guest) in self.hosts.guests.iter_mut().enumerate().skip(1) {
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
            Path::Fabric => {
                let daemon = &self.hosts.daemons[HOST_OF[DRIVERS[1]]];
                let [client, server] = &mut self.drivers;
                let cpu = |end: &dyn End| Ok(end.cpu()? + daemon.cpu_use()?.time);
                let to = at(DRIVERS[1], Sockets::Toe);
                return transfer([client, server], to, (case, bytes, seed), &cpu);
            }
            Path::Encrypted => {
                let Encrypted { daemons, drivers } = &mut self.encrypted;
                let [client, server] = drivers;
                let cpu = |end: &dyn End| Ok(end.cpu()? + daemons[1].cpu_use()?.time);
                return transfer([client, server], encrypted::at(), (case, bytes, seed), &cpu);
            }
            Path::Host => {
                let [client, server] = &mut self.on_hosts;
                let to = (ADDRESSES[1], PORT).into();
                return transfer([client, server], to, (case, bytes, seed), &|end| end.cpu());
            }
        };
        let before = self.hosts.given(server)?;
        let daemon = &self.hosts.daemons[HOST_OF[server]];
        let Ok([first, second]) = self.hosts.guests.get_disjoint_mut([0, server]) else {
            bail!("there are three guests");
        };
        let mut client = InGuest { guest: first, sockets };
        let mut receiver = InGuest { guest: second, sockets };
        let cpu = |end: &dyn End| Ok(end.cpu()? + daemon.cpu_use()?.time);
        let to = at(server, sockets);
        let sample = transfer([&mut client, &mut receiver], to, (case, bytes, seed), &cpu)?;
        let after = self.hosts.given(server)?;
        let least = if case == Case::RoundTrip { ROUND_TRIPS } else { bytes };
        let went_by_toe = after - before >= least as u64;
        ensure!(went_by_toe == (sockets == Sockets::Toe), "{} bytes went by TOE", after - before);
        Ok(sample)
    }

    /// Kills the guests and stops the daemons gracefully.
    pub(super) fn stop(self) -> Result<()> {
        self.encrypted.stop()?;
        self.hosts.stop()
    }
}

/// Where a guest listens.
fn at(guest: usize, sockets: Sockets) -> SocketAddr {
    let port = PORT + u16::from(sockets == Sockets::Toe);
    (nic(guest).address, port).into()
}
