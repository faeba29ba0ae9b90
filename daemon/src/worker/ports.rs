//! The ports of a worker as its turn sees them, and the watchers of their frames.

use nightporter_core::port::PortId;
use nightporter_core::time::Instant;
use nightporter_core::turn::{Ports, Received, Sent};
use nightporter_core::wire::virtio_net::VirtioNetHdr;

use super::watch::{Direction, Watchers};
use crate::closer;
use crate::port::attached::NET;
use crate::port::guest::GuestPort;
use crate::port::{Lost, Port};

/// A port and its name.
#[derive(Debug)]
pub(super) struct NamedPort {
    pub(super) name: String,
    pub(super) port: Port,
}

/// All ports of a worker, by their numbers. A number whose port was removed is vacant until another
/// port gets it.
#[derive(Debug)]
pub(super) struct WorkerPorts {
    pub(super) list: Vec<NamedPort>,
    pub(super) watchers: Watchers,
    /// Uplinks whose interfaces have gone since control was told, and the numbers of these.
    pub(super) lost: Vec<(String, u32)>,
    /// The time of this turn.
    pub(super) now: Instant,
}

impl WorkerPorts {
    pub(super) fn new(now: Instant) -> Self {
        Self { list: Vec::new(), watchers: Watchers::default(), lost: Vec::new(), now }
    }

    /// Adds the port that the engine calls `id`.
    pub(super) fn add(&mut self, id: PortId, name: String, port: Port) {
        let new = NamedPort { name, port };
        match self.list.get_mut(usize::from(id.0)) {
            Some(at) => {
                assert!(matches!(at.port, Port::Vacant), "the engine numbers ports as we do");
                *at = new;
            }
            None => {
                assert_eq!(self.list.len(), usize::from(id.0), "and from 0 on");
                self.list.push(new);
            }
        }
    }

    /// Takes out what was behind `id`.
    pub(super) fn remove(&mut self, id: PortId) -> Port {
        let at = self.of_mut(id);
        at.name = String::new();
        std::mem::replace(&mut at.port, Port::Vacant)
    }

    /// All ports and their numbers.
    pub(super) fn iter(&self) -> impl Iterator<Item = (PortId, &NamedPort)> {
        let all = (0..).map(PortId).zip(&self.list);
        all.filter(|(_, at)| !matches!(at.port, Port::Vacant))
    }

    pub(super) fn of(&self, port: PortId) -> &NamedPort {
        &self.list[usize::from(port.0)]
    }

    /// The name of a port; empty, if there is none.
    pub(super) fn name_of(&self, port: PortId) -> &str {
        self.list.get(usize::from(port.0)).map_or("", |at| &at.name)
    }

    pub(super) fn of_mut(&mut self, port: PortId) -> &mut NamedPort {
        &mut self.list[usize::from(port.0)]
    }

    /// The vhost-user port behind `port`, if it is one.
    pub(super) fn guest_mut(&mut self, port: PortId) -> Option<&mut GuestPort> {
        self.of_mut(port).port.as_guest_mut()
    }

    /// The port with this name.
    pub(super) fn find(&self, name: &str) -> Option<PortId> {
        self.iter().find(|(_, at)| at.name == name).map(|(id, _)| id)
    }

    /// The interface behind `port` is gone.
    pub(super) fn lose(&mut self, port: PortId) {
        let at = &mut self.list[usize::from(port.0)];
        let (Some(wanted), Some(index)) = (at.port.wanted(), at.port.index()) else { return };
        if at.port.is_guest() {
            tracing::warn!(vm = %at.name, "the VM's tap is gone");
        } else {
            tracing::error!(port = %at.name, "the interface is gone; its traffic is dropped");
        }
        let why = format!("{} is gone", at.port.ifname().unwrap_or_default());
        self.lost.push((at.name.clone(), index));
        let lost = Port::Lost(Box::new(Lost { wanted, why }));
        closer::later(None, std::mem::replace(&mut at.port, lost)); // interfaces take their time
        // The VM's end of a wire has no other way: the tap is plain, and is attached anew.
        let vm = at.name.strip_suffix(NET).map(str::to_owned);
        vm.and_then(|vm| self.find(&vm)).into_iter().for_each(|vm| self.lose(vm));
    }
}

impl Ports for WorkerPorts {
    fn receive(&mut self, port: PortId, buf: &mut [u8]) -> Received {
        let now = self.now;
        let received = self.of_mut(port).port.receive(now, buf);
        if received == Received::Gone {
            self.lose(port);
        }
        received
    }

    fn enters(&mut self, port: PortId, _: &VirtioNetHdr, frame: &[u8]) {
        self.watchers.see(self.now, port, Direction::FromPort, &[frame]);
    }

    fn send(&mut self, port: PortId, hdr: &VirtioNetHdr, parts: &[&[u8]], _waited: bool) -> Sent {
        let now = self.now;
        let sent = self.of_mut(port).port.send(now, hdr, parts);
        match sent {
            Sent::Done | Sent::Copied(_) => {
                self.watchers.see(self.now, port, Direction::ToPort, parts);
            }
            Sent::Gone => self.lose(port),
            Sent::Full | Sent::Dropped(_) => {}
        }
        sent
    }

    fn room(&mut self, port: PortId, want: usize) -> usize {
        self.of_mut(port).port.room(want)
    }

    fn has_spent(&mut self, port: PortId) -> bool {
        self.guest_mut(port).is_some_and(GuestPort::has_spent)
    }

    fn progress(&mut self, port: PortId) -> Option<bool> {
        self.of_mut(port).port.progress()
    }

    fn wait_for_frames(&mut self, port: PortId) -> bool {
        // A level-triggered descriptor needs no asking.
        self.guest_mut(port).is_some_and(GuestPort::arm)
    }

    fn wait_for_room(&mut self, port: PortId, waits: bool) {
        self.of_mut(port).port.wait_for_room(waits);
    }

    fn flush(&mut self, port: PortId) {
        if let Some(guest) = self.guest_mut(port) {
            guest.flush();
        }
    }
}
