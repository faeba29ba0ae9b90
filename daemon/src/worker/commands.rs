//! Operators' commands to a running worker, and the answers.

use nightporter_api::{Direction, RATE_LIMIT_MBIT_S_MAX, Reply, Request};
use nightporter_core::engine::{self, Engine};
use nightporter_core::port::PortId;
use nightporter_core::time::Instant;

use super::capture::Taking;
use super::data_path::DataPath;
use super::executor::Executor;
use super::orders::{Client, Report};
use super::ports::NamedPort;

impl Executor {
    /// Executes a client's request, or begins to.
    pub(super) fn handle_request(
        &mut self,
        now: Instant,
        path: &mut DataPath,
        client: Client,
        request: Request,
    ) {
        match request {
            Request::Status {} => self.survey.ask(client),
            request => {
                let reply = self.reply_to(now, path, client, request);
                self.report(Report::Reply(client, reply));
            }
        }
    }

    /// A client has gone.
    pub(super) fn forget_client(&mut self, path: &mut DataPath, client: Client) {
        path.ports.watchers.remove(client);
        self.survey.forget(client);
    }

    fn reply_to(
        &mut self,
        now: Instant,
        path: &mut DataPath,
        client: Client,
        request: Request,
    ) -> Reply {
        match request {
            Request::Status {} | Request::Change { .. } | Request::Stations { .. } => {
                unreachable!("others answer them")
            }
            Request::Flows { vm, from } => match vm.map(|vm| path.find_vm(&vm)).transpose() {
                Ok(vm) => Reply::Flows(path.flow_page(now, from, vm)),
                Err(reply) => reply,
            },
            Request::Macs { port, from } => {
                match port.map(|port| path.find_port(&port)).transpose() {
                    Ok(port) => Reply::Macs(path.mac_page(now, from, port)),
                    Err(reply) => reply,
                }
            }
            Request::Flow { id } => match path.engine.flow(index(id)) {
                Some(found) => Reply::Flow(Box::new(path.flow_info(now, found))),
                None => no_such_flow(id),
            },
            Request::Trace { id } => match path.engine.flow(index(id)) {
                Some(found) => {
                    path.ports.watchers.add_trace(now, client, found);
                    Reply::Stream {}
                }
                None => no_such_flow(id),
            },
            Request::Capture { port, snap_bytes, only } => match path.find_port(&port) {
                Err(reply) => reply,
                Ok(port) => {
                    path.ports.watchers.add_capture(now, client, port, Taking { snap_bytes, only });
                    Reply::Stream {}
                }
            },
            Request::Monitor { vm } => match path.find_vm(&vm) {
                Err(reply) => reply,
                Ok(port) => {
                    path.ports.watchers.add_monitor(now, client, port);
                    Reply::Stream {}
                }
            },
            Request::Offload { vm, on } => path.with_vm(&vm, |engine, id| {
                tracing::info!(vm, on, "ack offload");
                engine.set_offload(now, id, on);
            }),
            Request::CongestionOffload { vm, on: true } if path.has_tap(&vm) => Reply::Error {
                what: format!("{vm} has a tap: a wire that is plain for a moment must not flood"),
                fix: "give the VM a vhost-user socket instead of a tap".into(),
            },
            Request::CongestionOffload { vm, on } => path.with_vm(&vm, |engine, id| {
                tracing::info!(vm, on, "congestion offload");
                engine.set_congestion_offload(id, on);
            }),
            Request::RateLimit { vm, direction, mbit_s } => path.limit_rate(&vm, direction, mbit_s),
            Request::Drain { vm } => path.with_vm(&vm, |engine, id| {
                tracing::info!(vm, "draining");
                engine.drain(now, id);
            }),
        }
    }

    /// Moves the watchers' output to their clients.
    pub(super) fn feed_watchers(&mut self, path: &mut DataPath) {
        path.ports.watchers.note_states(&path.engine);
        path.ports.watchers.drain(|client, bytes| self.report(Report::Piece(client, bytes)));
    }
}

impl DataPath {
    fn with_vm(&mut self, name: &str, act: impl FnOnce(&mut Engine<'_>, PortId)) -> Reply {
        match self.find_vm(name) {
            Err(reply) => reply,
            Ok(port) => {
                act(&mut self.engine, port);
                self.heartbeats.handle_change();
                Reply::Done {}
            }
        }
    }

    fn limit_rate(&mut self, vm: &str, direction: Direction, mbit_s: Option<u32>) -> Reply {
        if mbit_s.is_some_and(|rate| !(1..=RATE_LIMIT_MBIT_S_MAX).contains(&rate)) {
            return Reply::Error {
                what: "that is not a rate limit".into(),
                fix: format!("give 1 to {RATE_LIMIT_MBIT_S_MAX} Mbit/s, or none"),
            };
        }
        let port = match self.find_vm(vm) {
            Ok(port) => port,
            Err(reply) => return reply,
        };
        tracing::info!(vm, ?direction, mbit_s, "rate limit");
        let way = match direction {
            Direction::FromGuest => engine::Direction::FromGuest,
            Direction::ToGuest => engine::Direction::ToGuest,
        };
        self.set_rate_limit(port, way, mbit_s);
        Reply::Done {}
    }

    fn find_vm(&self, name: &str) -> Result<PortId, Reply> {
        let is_vm = |at: &NamedPort| at.port.is_guest();
        let found = self.ports.find(name).filter(|&p| is_vm(self.ports.of(p)));
        found.ok_or_else(|| self.no_such("VM", name, is_vm))
    }

    fn find_port(&self, name: &str) -> Result<PortId, Reply> {
        self.ports.find(name).ok_or_else(|| self.no_such("port", name, |_| true))
    }

    fn no_such(&self, kind: &str, name: &str, is_one: impl Fn(&NamedPort) -> bool) -> Reply {
        let names = self.ports.iter().filter(|(_, at)| is_one(at)).map(|(_, at)| at.name.as_str());
        let names = names.collect::<Vec<_>>().join(", ");
        Reply::Error {
            what: format!("there is no {kind} \"{name}\""),
            fix: if names.is_empty() {
                "add one to the configuration".into()
            } else {
                format!("use one of: {names}")
            },
        }
    }
}

/// A flow's number as an index; one that cannot be one finds nothing.
fn index(id: u64) -> usize {
    usize::try_from(id).unwrap_or(usize::MAX)
}

fn no_such_flow(id: u64) -> Reply {
    Reply::Error {
        what: format!("there is no flow {id} (any more)"),
        fix: "nightporter flows lists those there are".into(),
    }
}
