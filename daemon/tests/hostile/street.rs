//! A VM that means harm among VMs that do not.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use nightporter_core::wire::virtio_net::VirtioNetHdr;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use crate::guest::{EVENTS, Guest};
use crate::host::{Dir, Host, LIMIT};

pub(crate) const QUIET: &str = "metrics = \"off\"";
/// Of a VM that is nothing but another port of a switch.
const PLAIN_PORT: &str = "ack_offload = false";

/// A host with a VM that means harm, two that do not, and these two.
pub(crate) struct Street {
    pub(crate) dir: Dir,
    pub(crate) host: Host,
    neighbours: [Guest; 2],
}

impl Street {
    /// With more in the section of the VM that means harm.
    pub(crate) fn new(bad: &str) -> Self {
        Self::among(bad, &[])
    }

    /// Likewise, and VMs of these names whose guests are not there yet.
    pub(crate) fn among(bad: &str, others: &[String]) -> Self {
        let others = others.iter().map(|name| (name.as_str(), PLAIN_PORT));
        Self::of(&[("bad", bad)].into_iter().chain(others).collect::<Vec<_>>())
    }

    /// With VMs of these names, who have this in their sections, beside the two.
    pub(crate) fn of(vms: &[(&str, &str)]) -> Self {
        Self::with(vms, "")
    }

    /// Likewise, and with other ports.
    pub(crate) fn with(vms: &[(&str, &str)], ports: &str) -> Self {
        let dir = Dir::new();
        let neighbours = ["a", "b"].map(|name| (name, PLAIN_PORT));
        let vms: String =
            vms.iter().chain(&neighbours).map(|(name, more)| dir.vm(name, more)).collect();
        let host = Host::start(&dir, &dir.configure(QUIET, &(ports.to_owned() + &vms)));
        let neighbours = ["a", "b"].map(|name| {
            let mut guest = Guest::boot(&dir.join(name), EVENTS);
            guest.offer(64);
            guest
        });
        Self { dir, host, neighbours }
    }

    /// The neighbours still hear each other.
    pub(crate) fn goes_on(&mut self) {
        let [a, b] = &mut self.neighbours;
        let mut frame = [[0xff; 6], [2, 0, 0, 0, 0, 1]].concat();
        frame.extend([0x88, 0xb5]); // "local experimental" (IEEE 802)
        frame.resize(60, 7);
        a.send(&[(VirtioNetHdr::default(), frame.clone())]);
        assert_eq!(b.receive(1), [frame]);
        b.offer(1);
    }

    /// One neighbour is heard by the other, and answered: how long that takes.
    pub(crate) fn echo(&mut self) -> Duration {
        let start = Instant::now();
        let [a, b] = &mut self.neighbours;
        for (from, to, n) in [(1, 2, 7), (2, 1, 8)] {
            let mut frame = [[2, 0, 0, 0, 0, to], [2, 0, 0, 0, 0, from]].concat();
            frame.extend([0x88, 0xb5]); // "local experimental" (IEEE 802)
            frame.resize(60, n);
            let (speaker, hearer) = if from == 1 { (&mut *a, &mut *b) } else { (&mut *b, &mut *a) };
            speaker.send_plain(&frame);
            // Broadcasts of the hostile VM arrive here too.
            while !hearer.hears().contains(&frame) {
                assert!(start.elapsed() < LIMIT, "{n}: nothing but others' frames");
            }
        }
        start.elapsed()
    }
}

/// Connects, or says that this would take waiting.
pub(crate) fn connect_at_once(path: &Path) -> io::Result<OwnedFd> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}
