//! VMs that migrate to another host (LIFE-06): the order of what ends here when their rings stop.
//!
//! The VMM's message waits meanwhile, so that everything happens before it is answered: the
//! guest's last frames are read (its vCPUs stand, and its ACKs settle debts), then its connections
//! end, then the resets leave.

use nightporter_core::port::PortId;
use nightporter_core::time::Instant;
use nix::sys::epoll::Epoll;

use super::data_path::DataPath;
use crate::port::front_end::hear;
use crate::vhost::Source;

/// Turns in which the last frames of a guest are read, 64 frames each or 128 KiB. The next host
/// reads what they leave.
const LAST_TURNS: u8 = 64;

/// A VM whose VMM waits for its rings to stop.
#[derive(Debug)]
pub(super) struct Leaving {
    pub(super) port: PortId,
    /// More turns for its last frames; `None`: its connections end.
    turns: Option<u8>,
}

impl DataPath {
    /// The VMM of `port` wants to stop the rings of a VM that may migrate.
    pub(super) fn begin_leaving(&mut self, port: PortId) {
        self.turn.wake(port);
        self.announcements.retain(|it| it.port != port); // LIFE-07
        self.leaving.push(Leaving { port, turns: Some(LAST_TURNS) });
    }

    /// Whether the VMM of `port` has to wait.
    pub(super) fn is_leaving(&self, port: PortId) -> bool {
        self.leaving.iter().any(|it| it.port == port)
    }

    /// After a turn: the next step of each of them.
    pub(super) fn go_on_leaving(&mut self, now: Instant, epoll: &Epoll) {
        for mut it in std::mem::take(&mut self.leaving) {
            let port = it.port;
            match it.turns {
                // Connections of a guest that was there before end first.
                Some(_) if self.engine.is_ending(port) => {}
                Some(turns) if turns > 0 && self.turn.is_awake(port) => it.turns = Some(turns - 1),
                Some(_) => {
                    self.report_leaving(port);
                    self.engine.handle_guest_leaves(now, port);
                    it.turns = None;
                }
                None if self.engine.is_ending(port) => {}
                None => {
                    if let Some(guest) = self.ports.guest_mut(port) {
                        hear(&mut guest.port, Source::Connection);
                        self.handle_guest_events(now, epoll, port);
                    }
                    continue;
                }
            }
            self.leaving.push(it);
        }
    }

    fn report_leaving(&mut self, port: PortId) {
        let owed = self.engine.vm(port).map_or(0, |vm| vm.owing_flows);
        if let Some(guest) = self.ports.guest_mut(port)
            && guest.port.may_log()
        {
            let vm = &self.ports.of(port).name;
            tracing::info!(vm, owed, "the VM leaves; connections that are owed bytes are reset");
        }
    }
}
