//! A host with guests, their two NICs, and a remote host: the world of the demo and the scenarios.

use std::net::Ipv4Addr;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use nightporter_guest::control::Command;

use crate::captures::{Captures, UPLINK};
use crate::daemon::{Daemon, Vm};
use crate::host::{self, Host, Remote, guest_nic};
use crate::image::Image;
use crate::link::{Measured, Shape};
use crate::passt::{self, Passt};
use crate::vmm::{Attach, Guest, Places, Spec, Vmm};

/// A TCG guest boots in two seconds on an idle machine.
pub const BOOT_LIMIT: Duration = Duration::from_secs(60);

/// Guest memory: the demo's bulk row is kept in memory until it is hashed.
const GUEST_MEMORY_MIB: u32 = 192;

/// The tap of the first guest that is attached.
pub(crate) const ATTACHED: &str = "attached";

/// One of a guest's NICs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Net {
    /// On QEMU's (or user-mode Linux's) own tap.
    Tap,
    /// On Nightporter.
    Nightporter,
    /// On passt.
    Passt,
    /// On passt with larger receive buffers.
    PasstTuned,
    /// On QEMU's (or user-mode Linux's) own tap, which is attached to Nightporter.
    Attached,
}

impl Net {
    /// Number of its subnet.
    pub(crate) fn subnet(self) -> u8 {
        match self {
            Self::Tap => 1,
            Self::Nightporter => 2,
            Self::Passt => 3,
            Self::PasstTuned => 4,
            Self::Attached => 5,
        }
    }

    /// The guest's index of this NIC, of the first two.
    #[must_use]
    pub fn nic(self) -> usize {
        self as usize
    }
}

/// Everything that runs. Dropping it kills it.
#[derive(Debug)]
pub struct World {
    /// The guests. Dropped first: a VMM whose back-end goes away only complains.
    pub guests: Vec<Guest>,
    /// nightporterd, unless the world has taps only.
    pub daemon: Option<Daemon>,
    /// Those of the first guest.
    passts: Vec<(Net, passt::Running)>,
    host: Host,
}

/// The parts of a world besides guests, taps and a remote host.
#[derive(Clone, Copy, Debug, Default)]
pub struct Plan<'a> {
    /// The daemon, and a NIC of each guest on it.
    pub daemon: bool,
    /// With a daemon: a socket device in each guest.
    pub toe: bool,
    /// With a daemon: `vm.boost` of the first guest.
    pub boost: Option<&'a str>,
    /// With a daemon: the first guest forwards to the addresses [`behind`](host::behind) its NIC.
    pub forwards: bool,
    /// Buffers in the receive rings of all NICs, for guests of QEMU; `None`: its default.
    pub rx_ring: Option<u16>,
    /// With a daemon: a third NIC of the first guest, on a tap that is attached.
    pub attach: bool,
    /// The link to the remote host. `None`: it is next door.
    pub link: Option<Shape>,
    /// passt, and the NICs of the first guest on it.
    pub passt: Option<(&'a Passt, &'a [Net])>,
}

/// The name of a guest, also of its port on the daemon.
#[must_use]
pub fn guest_name(guest: u8) -> String {
    format!("guest{guest}")
}

/// The name of the first guest's port behind the tap that is attached.
#[must_use]
pub fn attached_name() -> String {
    format!("{}-attached", guest_name(0))
}

/// The address of a guest's NIC.
#[must_use]
pub fn address(guest: u8, net: Net) -> Ipv4Addr {
    guest_nic(guest, net.subnet()).address
}

impl World {
    /// Moves the calling thread into a private network namespace and boots one guest per entry of
    /// `guests`, at the same time; returns when all are up. Without the daemon the guests have the
    /// tap NIC only; without a link the remote host is next door.
    ///
    /// # Errors
    /// Whatever did not start; the message holds the end of its log.
    pub fn start(
        guests: &[(Vmm, &Image)],
        with_daemon: bool,
        link: Option<Shape>,
        places: Places<'_>,
    ) -> Result<Self> {
        let plan = Plan { daemon: with_daemon, link, ..Plan::default() };
        Self::start_as(guests, plan, places)
    }

    /// Likewise, with a daemon, and a socket device in each guest.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_with_toe(guests: &[(Vmm, &Image)], places: Places<'_>) -> Result<Self> {
        Self::start_as(guests, Plan { daemon: true, toe: true, ..Plan::default() }, places)
    }

    /// Likewise, with a daemon, and a guest that forwards.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_router(guest: (Vmm, &Image), places: Places<'_>) -> Result<Self> {
        let plan = Plan { daemon: true, forwards: true, ..Plan::default() };
        Self::start_as(&[guest], plan, places)
    }

    /// Likewise, with a daemon, and a guest with a tap that is attached.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_attached(guest: (Vmm, &Image), places: Places<'_>) -> Result<Self> {
        let plan = Plan { daemon: true, attach: true, ..Plan::default() };
        Self::start_as(&[guest], plan, places)
    }

    /// Likewise, with what the plan says.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_as(guests: &[(Vmm, &Image)], plan: Plan<'_>, places: Places<'_>) -> Result<Self> {
        let mut subnets = vec![Net::Tap.subnet(), Net::Nightporter.subnet()];
        subnets.extend(plan.passt.iter().flat_map(|(_, nets)| nets.iter().map(|net| net.subnet())));
        subnets.extend(plan.attach.then(|| Net::Attached.subnet()));
        let host = Host::create(&subnets, plan.link)?;
        let count = u8::try_from(guests.len()).context("a handful of guests")?;
        if plan.attach {
            host.add_tap(ATTACHED)?;
        }
        let daemon = plan.daemon.then(|| start_daemon(&host, guests, plan, places)).transpose()?;
        let passts = start_passts(&host, plan, places)?;
        if plan.forwards {
            host.remote().reach_behind(Net::Nightporter.subnet())?;
        }
        let mut world = Self { guests: Vec::new(), daemon, passts, host };
        for (index, (vmm, image)) in (0..count).zip(guests) {
            world.guests.push(world.start_guest(index, (*vmm, image), plan, places)?);
        }
        for (guest, (vmm, _)) in world.guests.iter_mut().zip(guests) {
            guest.wait_ready(BOOT_LIMIT)?;
            if *vmm == Vmm::Uml {
                // On a busy machine user-mode Linux 6.1 sleeps until its next signal at times, with
                // its ring full of frames: 0.05 to 0.4 s, enough for a timeout of its TCP. A load
                // of as good as nothing is a timer every 10 ms.
                guest.call(&Command::LoadStart { loops_per_ms: 100, percent: 1 })?;
            }
        }
        Ok(world)
    }

    /// The remote host.
    #[must_use]
    pub fn remote(&self) -> &Remote {
        self.host.remote()
    }

    /// The host's side of the network.
    #[must_use]
    pub fn host(&self) -> &Host {
        &self.host
    }

    /// The measured values of the link.
    #[must_use]
    pub fn link(&self) -> Option<Measured> {
        self.host.measured()
    }

    /// The daemon.
    ///
    /// # Errors
    /// This world has none.
    pub fn daemon(&mut self) -> Result<&mut Daemon> {
        self.daemon.as_mut().context("this needs nightporterd")
    }

    /// Processes that carry the guests' frames.
    pub(crate) fn back_ends(&self) -> impl Iterator<Item = i32> {
        let daemon = self.daemon.iter().map(Daemon::pid);
        daemon.chain(self.passts.iter().map(|(_, passt)| passt.pid()))
    }

    /// The process that carries the first guest's frames of this NIC; QEMU's own tap has none.
    pub(crate) fn back_end(&self, net: Net) -> Option<i32> {
        match net {
            Net::Tap => None,
            Net::Nightporter | Net::Attached => self.daemon.as_ref().map(Daemon::pid),
            Net::Passt | Net::PasstTuned => {
                self.passts.iter().find(|(of, _)| *of == net).map(|(_, passt)| passt.pid())
            }
        }
    }

    /// Captures both sides of a guest's connections over this NIC, one on the daemon, into `dir`.
    ///
    /// # Errors
    /// Those of [`Captures::start`].
    pub fn capture(&mut self, guest: u8, net: Net, dir: &Path) -> Result<Captures> {
        let nic = guest_nic(guest, net.subnet());
        let ports = match net {
            Net::Attached => [format!("{}/net", attached_name()), attached_name()],
            _ => [UPLINK.to_owned(), guest_name(guest)],
        };
        Captures::start(self.daemon()?, ports, &nic, dir)
    }

    /// Kills the guests and stops the daemon gracefully.
    ///
    /// # Errors
    /// The daemon did not end well.
    pub fn stop(self) -> Result<()> {
        drop(self.guests);
        self.daemon.map_or(Ok(()), Daemon::stop)
    }

    fn start_guest(
        &self,
        index: u8,
        (vmm, image): (Vmm, &Image),
        plan: Plan<'_>,
        places: Places<'_>,
    ) -> Result<Guest> {
        let name = guest_name(index);
        let tap = format!("tap{index}");
        self.host.add_tap(&tap)?;
        let mut nics = vec![(guest_nic(index, Net::Tap.subnet()), Attach::Tap(tap))];
        if let Some(daemon) = &self.daemon {
            let nic = guest_nic(index, Net::Nightporter.subnet());
            nics.push((nic, Attach::VhostUser(daemon.socket(&name))));
        }
        let mut subnets = vec![Net::Tap.subnet(), Net::Nightporter.subnet()];
        for (net, passt) in self.passts.iter().filter(|_| index == 0) {
            let nic = guest_nic(index, net.subnet());
            nics.push((nic, Attach::VhostUser(passt.socket.clone())));
            subnets.push(net.subnet());
        }
        if plan.attach && index == 0 {
            let nic = guest_nic(index, Net::Attached.subnet());
            nics.push((nic, Attach::Tap(ATTACHED.to_owned())));
            subnets.push(Net::Attached.subnet());
        }
        nics.iter().try_for_each(|(nic, _)| self.host.remote().know(nic))?;
        let neighbours = host::remote_neighbours(&subnets);
        let toe = self.daemon.as_ref().filter(|_| plan.toe).map(|daemon| daemon.toe_socket(&name));
        let (memory_mib, rx_ring, moves) = (GUEST_MEMORY_MIB, plan.rx_ring, None);
        let spec = Spec { name, vmm, memory_mib, nics, neighbours, toe, rx_ring, moves };
        Guest::start(&spec, image, places)
    }
}

fn start_passts(
    host: &Host,
    plan: Plan<'_>,
    places: Places<'_>,
) -> Result<Vec<(Net, passt::Running)>> {
    let Some((passt, nets)) = plan.passt else { return Ok(Vec::new()) };
    let start = |&net: &Net| {
        let (name, tuned) =
            if net == Net::PasstTuned { ("passt-tuned", true) } else { ("passt", false) };
        let at = (name, &guest_nic(0, net.subnet()), net.subnet());
        Ok((net, passt.start(host, at, tuned, (places.sockets, places.logs))?))
    };
    nets.iter().map(start).collect()
}

fn start_daemon(
    host: &Host,
    guests: &[(Vmm, &Image)],
    Plan { toe, boost, forwards, attach, .. }: Plan<'_>,
    places: Places<'_>,
) -> Result<Daemon> {
    host.add_tap("uplink")?;
    let mut vms: Vec<_> = (0..)
        .zip(guests)
        .map(|(index, (vmm, _))| {
            let nic = guest_nic(index, Net::Nightporter.subnet());
            let boost = boost.filter(|_| index == 0).map(str::to_owned);
            let behind = host::all_behind(Net::Nightporter.subnet());
            let behind = behind.filter(|_| forwards && index == 0).collect();
            Vm { name: guest_name(index), nic, tap: None, behind, vmm: *vmm, toe, boost }
        })
        .collect();
    if let Some((vmm, _)) = guests.first().filter(|_| attach) {
        let (name, nic) = (attached_name(), guest_nic(0, Net::Attached.subnet()));
        let tap = Some(ATTACHED.to_owned());
        let behind = Vec::new();
        vms.push(Vm { name, nic, tap, behind, vmm: *vmm, toe: false, boost: None });
    }
    Daemon::start("uplink", &vms, places.sockets, &places.logs.join("nightporterd.log"))
}
