//! The virtual TOE of this host: socket devices of guests, the core's table of their sockets, and
//! both fabrics, between guests of one host (here) and between hosts (`remote`, over the streams of
//! `fabric`); see `docs/virtual-toe.md`.
//!
//! # One turn
//!
//! Each device that is awake: what waits for its guest goes into the ring, then packets of the
//! guest are read, up to [`PACKETS_PER_TURN`] and [`BYTES_PER_TURN`]. Payload for a guest of this
//! host is copied from ring to ring, at once. After each packet all is heard that the core has to
//! say. Then each stream of another host that has something. At the end every ring that was touched
//! is shown to its guest, which is signalled what it was given, and later what was taken.
//!
//! # Packets for which a ring has no room
//!
//! Packets without payload are made when the ring has room, of the state that the core's sockets
//! have then. Only if a guest does not take answers to packets of its own, none of its packets are
//! read meanwhile. Payload is kept for the receiver ([`kept`]), at most `TOE_KEPT_MAX` bytes of one
//! sender: then that guest's ring waits until half of it has gone. If it waits too long
//! ([`stalls`]), connections are reset of which something was kept for so long: so nobody who takes
//! nothing, or nearly nothing, stops a sender for others.

mod arrivals;
mod backlog;
mod batch;
mod descriptors;
mod device;
mod fabric;
mod limits;
mod listings;
pub(crate) mod orders;
mod refusals;
mod remote;
mod rules;
mod shares;
mod stalls;
mod transfer;
mod trust;
mod ucx;
pub(crate) mod worker;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;

use nightporter_core::engine::Direction;
use nightporter_core::port::PortId;
use nightporter_core::time::{Duration, Instant};
use nightporter_core::toe::control;
use nightporter_core::toe::errno::Errno;
use nightporter_core::toe::guest::GuestConfig;
use nightporter_core::toe::host::{Handled, Host, Output};
use nightporter_core::toe::id::{HostId, ShadowId, Side};
use nightporter_core::toe::message::{Kind, Message};
use nightporter_core::toe::sockets::{SocketId, VmId};
use nightporter_core::wire::vsock::Header;

use crate::config::ToeRule;
use crate::port::vhost_user::VhostUserPort;
use crate::vhost::vsock::Vsock;
use arrivals::Promises;
use backlog::KeptBytes;
use batch::Batch;
use device::{Blocked, Device};
pub(crate) use fabric::{Doors, listen_at};
use fabric::{Gone, StreamId, Streams};
pub use fabric::{Heard, SealedReader, StreamReader};
use listings::Listings;
pub use rules::Member;
use rules::Rules;
pub(crate) use rules::{Overlays, toe_of};
pub(crate) use trust::ProofDoors;
pub use trust::rehearsal as trust_rehearsal;
pub(crate) use ucx::Worker as UcxWorker;

/// The CID of every guest: it names one to its own device alone, so it need not differ, and stays
/// when the VM moves to another host. The smallest that a guest may have (virtio 1.2, 5.10.4).
pub const GUEST_CID: u64 = 3;
/// This host.
const HERE: HostId = HostId(0);
/// Packets of a guest that are read in a turn, and about how many bytes.
const PACKETS_PER_TURN: u64 = 64;
const BYTES_PER_TURN: usize = 1 << 20;
/// A guest is signalled after this time that packets of it were taken, if they are not many before.
/// Linux waits for places in its ring and for hardly anything else, but asks for a signal for each
/// packet, and each costs it an interrupt and a work item.
const T_SIGNAL: Duration = Duration::from_millis(5);

/// See the module's doc.
#[derive(Debug)]
pub struct Toe {
    host: Host,
    rules: Rules,
    /// By the number of the VM's port.
    devices: Vec<Option<Box<Device>>>,
    kept: KeptBytes,
    /// Devices to be served in the next turn, and those that were touched in this one.
    awake: VecDeque<usize>,
    touched: Vec<usize>,
    /// Devices that are not read because so much is kept of what they sent, and when those are
    /// looked at that it is kept for.
    stalled: Vec<(usize, Instant)>,
    /// To other hosts.
    streams: Streams,
    /// Bytes that they may have under way by UCX.
    promises: Promises,
    /// The next message to it. Nothing, but while a guest is read.
    batch: Batch,
    /// Guests of other hosts whose streams are to end.
    gone: Vec<Gone>,
    /// The one that is heard now: what is for nobody is answered there.
    heard: Option<StreamId>,
    /// Guests that are to be told that their packets were taken, and when, the first one first.
    unsignalled: VecDeque<(Instant, usize)>,
    /// Devices that wait until their rate allows more, and for how long.
    limited: Vec<(Instant, usize, Direction)>,
    /// Sockets whose senders are shown no more room than a share, and when they last sent: see
    /// [`shares`].
    narrow: BTreeMap<SocketId, u64>,
    /// Devices whose driver has come, and what the one before it had is being reset.
    late: BTreeSet<usize>,
    /// Timers wait for devices that are awake, until then.
    patient_until: Instant,
    listings: Listings,
}

impl Toe {
    /// Without devices. `incarnation`: see [`Host::new`].
    pub fn new(incarnation: u64) -> Self {
        Self {
            host: Host::new(incarnation),
            rules: Rules::default(),
            devices: Vec::new(),
            kept: KeptBytes::default(),
            awake: VecDeque::new(),
            touched: Vec::new(),
            stalled: Vec::new(),
            streams: Streams::default(),
            promises: Promises::default(),
            batch: Batch::default(),
            gone: Vec::new(),
            heard: None,
            unsignalled: VecDeque::new(),
            limited: Vec::new(),
            narrow: BTreeMap::new(),
            late: BTreeSet::new(),
            patient_until: Instant::ZERO,
            listings: Listings::new(),
        }
    }

    /// The device of the VM behind this port.
    pub fn port_mut(&mut self, port: PortId) -> Option<&mut VhostUserPort<Vsock>> {
        Some(&mut self.device_mut(port.0.into())?.port)
    }

    /// The devices there are.
    pub(crate) fn ports(&self) -> Vec<PortId> {
        let there = (0..).map(PortId).zip(&self.devices);
        there.filter(|(_, device)| device.is_some()).map(|(port, _)| port).collect()
    }

    /// Other rules of the operator's, for what connects from now on.
    pub(crate) fn set_rules(&mut self, rules: Vec<ToeRule>) {
        self.rules.rules = rules;
    }

    /// A VM has a device from now on.
    pub fn add(&mut self, port: PortId, device: VhostUserPort<Vsock>, member: Member) {
        let at = usize::from(port.0);
        if self.devices.len() <= at {
            self.devices.resize_with(at + 1, || None);
        }
        assert!(self.devices[at].is_none(), "a VM has one socket device");
        self.devices[at] = Some(Box::new(Device::new(device)));
        self.rules.add(vm(at), member);
    }

    /// It has none any more. Its port was closed before, and what that caused is done. Sockets that
    /// are left end in steps: whoever has its number next waits for them.
    pub(crate) fn remove(&mut self, now: Instant, port: PortId) {
        let at = usize::from(port.0);
        self.forget(at);
        self.host.forget_vm(now, vm(at));
        self.listings.forget(vm(at));
        self.hear(now);
        self.rules.remove(vm(at));
        if let Some(device) = self.devices.get_mut(at) {
            *device = None;
        }
        self.limited.retain(|(_, limited, _)| *limited != at);
        self.unsignalled.retain(|(_, unsignalled)| *unsignalled != at);
        self.end_turn(now);
    }

    /// The rules of a VM have changed: all connections that it has are reset, in steps. Its driver
    /// stays, and what that says meanwhile is heard when all have ended, by the new rules.
    pub fn set(&mut self, now: Instant, port: PortId, member: Member) {
        let at = usize::from(port.0);
        if self.rules.is(vm(at), &member) {
            return;
        }
        self.rules.add(vm(at), member);
        self.host.end_closed(vm(at));
        self.lose_guest(now, at);
        self.look_at_link(now, port);
        self.end_turn(now);
    }

    /// Connections that the guest of this VM has closed end as well: its device is about to be
    /// removed.
    pub(crate) fn prepare_removal(&mut self, port: PortId) {
        self.host.end_closed(vm(port.0.into()));
    }

    /// The core's news of a guest whose driver runs.
    fn start(&mut self, at: usize) -> Option<GuestConfig> {
        let (ips, network) = self.rules.start(vm(at))?;
        Some(GuestConfig { cid: GUEST_CID, network, ips })
    }

    /// There may be something to do for this device.
    pub fn wake(&mut self, port: PortId) {
        self.wake_device(port.0.into());
    }

    /// The driver has gone, and may be here again already.
    pub fn lose(&mut self, now: Instant, port: PortId) {
        self.lose_guest(now, port.0.into());
        self.end_turn(now);
    }

    /// A driver has come, or was caught lying.
    pub fn look_at_link(&mut self, now: Instant, port: PortId) {
        let at = usize::from(port.0);
        let ends = self.host.is_ending(vm(at));
        let Some(device) = self.device_mut(at) else { return };
        match (device.is_up, device.port.is_up()) {
            (true, false) => self.lose(now, port),
            (false, true) if ends => {
                self.late.insert(at);
            }
            (false, true) => {
                device.is_up = true;
                let goes_on = device.port.goes_on();
                if let Some(config) = self.start(at) {
                    let others = self.host.add_guest(vm(at), config, goes_on);
                    self.warn_of(at, &others);
                }
                self.wake_device(at);
            }
            _ => {}
        }
    }

    /// Whether there is more to do at once.
    pub fn has_work(&self) -> bool {
        let ends = self.host.ends() || !self.late.is_empty() || !self.gone.is_empty();
        let may_move = self.streams.ready() > 0 || self.streams.is_ucx_ready();
        !self.awake.is_empty() || may_move || ends
    }

    /// When there is something to do, if nothing else happens.
    pub fn poll_timeout(&self) -> Option<Instant> {
        let signals = self.unsignalled.front().map(|(at, _)| *at);
        let stalls = self.stalled.iter().map(|(_, at)| *at).chain(signals);
        let limited = self.limited.iter().map(|(at, ..)| *at);
        let others = self.host.poll_timeout().into_iter().chain(self.streams.poll_timeout());
        stalls.chain(limited).chain(others).min()
    }

    /// One turn; how many packets were read.
    pub fn turn(&mut self, now: Instant) -> u64 {
        self.hear_ucx(now);
        if self.devices.is_empty() && !self.streams.is_open() {
            self.streams.arm_ucx();
            return 0;
        }
        self.note_pause(now);
        self.rules.refusals.forgive(now);
        self.signal_taken(now);
        self.lift_limits(now);
        self.go_on_ending(now);
        self.end_streams_of_gone(now);
        let mut packets = 0;
        for _ in 0..self.awake.len() {
            let Some(at) = self.awake.pop_front() else { break };
            let Some(device) = self.device_mut(at) else { continue };
            device.is_awake = false;
            if !device.is_up {
                continue;
            }
            device.port.disable_packet_kicks();
            device.limits.choose(now, !device.streams.is_empty());
            self.touch(at);
            let given = self.give_waiting(now, at, BYTES_PER_TURN);
            packets += self.read(now, at);
            if self.kept.is_ready(at) && given < BYTES_PER_TURN {
                self.give_waiting(now, at, BYTES_PER_TURN - given); // it may have said it has room
            }
            self.go_on_choosing(at);
        }
        self.serve_streams(now);
        self.end_stalls(now);
        if now >= self.patient_until || !self.has_work() {
            self.look_at_old_streams(now);
            if self.host.poll_timeout().is_some_and(|at| at <= now) {
                self.host.handle_timeout(now);
                self.hear(now);
            }
        }
        self.end_turn(now);
        self.streams.arm_ucx();
        packets
    }

    /// Guests are signalled that their packets were taken, unless they were meanwhile.
    fn signal_taken(&mut self, now: Instant) {
        while let Some((_, at)) = self.unsignalled.front().copied().filter(|due| due.0 <= now) {
            self.unsignalled.pop_front();
            if let Some(device) = self.device_mut(at) {
                device.is_signalled_later = false;
                device.port.signal_taken();
            }
        }
    }

    /// Sockets of guests that have gone are reset in steps; who comes after them has waited.
    fn go_on_ending(&mut self, now: Instant) {
        if self.host.ends() {
            self.host.go_on_ending(now);
            self.hear(now);
        }
        for at in std::mem::take(&mut self.late) {
            self.look_at_link(now, PortId(u16::try_from(at).expect("the number of a port")));
        }
    }

    /// Whether the guest of the VM behind this port has gone, and not all its sockets are reset.
    pub(crate) fn is_ending(&self, port: PortId) -> bool {
        self.host.is_ending(vm(port.0.into()))
    }

    /// Reads packets of a guest.
    fn read(&mut self, now: Instant, at: usize) -> u64 {
        let packets = self.read_packets(now, at);
        self.send_batch(now);
        self.hear(now);
        packets
    }

    fn read_packets(&mut self, now: Instant, at: usize) -> u64 {
        let (mut packets, mut bytes) = (0, 0);
        while packets < PACKETS_PER_TURN && bytes < BYTES_PER_TURN {
            let stalls = self.stalls(now, at) || self.is_limited(now, at, Direction::FromGuest);
            let Self { host, rules, devices, .. } = self;
            let Some(device) = devices[at].as_mut() else { return packets };
            if stalls || host.owes_answers(vm(at)) {
                return packets; // it is woken when there is room again
            }
            let Some((header, payload)) = device.port.poll_packet() else { return packets };
            if device.port.has_new_fault() {
                return packets; // zeros instead of what the guest said
            }
            (packets, bytes) = (packets + 1 + asks(&header), bytes + payload);
            device.stats.packets_from_guest += 1;
            // Of a chain that is longer than its packet no more is carried.
            let carried = payload.min(header.len as usize);
            device.limits.charge(now, Direction::FromGuest, carried);
            let mut read = |out: &mut [u8]| device.port.read_payload(0, out);
            let handled = host.handle_packet(now, vm(at), &header, payload, &mut read, rules);
            match handled {
                Handled::Carry(socket, message) if host.host_of(socket) != Some(HERE) => {
                    self.send_away(now, (at, socket), &message);
                }
                handled => {
                    self.send_batch(now); // it stands before this one
                    if let Handled::Carry(socket, message) = handled {
                        self.carry(now, (at, socket), &message);
                    }
                    if let Some(device) = self.device_mut(at) {
                        device.port.packet_done();
                    }
                }
            }
            self.look_for_room(at, &header);
            self.hear(now);
        }
        self.wake_device(at);
        packets
    }

    /// All that the core has to say.
    fn hear(&mut self, now: Instant) {
        while let Some(output) = self.host.poll_output(now) {
            if !matches!(output, Output::Packets(_)) {
                self.send_batch(now); // what is said of a socket is said behind its payload
            }
            match output {
                Output::Message(socket, HERE, message, request) => match message.kind {
                    Kind::Request { .. } if !self.rules.may(&request) => {
                        let kind = Kind::Reset(Errno::NotByToe);
                        let refusal = Message { kind, to: Side::Opener, ..message };
                        let _ = self.host.handle_message(now, HERE, &refusal);
                    }
                    Kind::Request { .. } => {
                        let opener = self.rules.opener(HERE, &request);
                        self.host.handle_request(now, HERE, &message, &request, opener);
                        self.look_at_both(now, socket, message.id);
                    }
                    _ => {
                        self.note_refusal(now, HERE, &message);
                        let met = self.host.handle_message(now, HERE, &message);
                        // The stream may have ended: nothing more is about to come.
                        let to = met.socket.and_then(|socket| self.kept.try_again(socket));
                        to.into_iter().for_each(|to| self.wake_device(to));
                    }
                },
                Output::Message(socket, host, message, request) => {
                    self.say(now, (socket, host), &message, &request);
                }
                Output::Return(HERE, message) => {
                    self.note_refusal(now, HERE, &message);
                    let _ = self.host.handle_message(now, HERE, &message);
                }
                Output::Return(_, message) => self.answer(now, &message),
                Output::Packets(VmId(to)) => {
                    self.give_packets(to as usize);
                }
                Output::Gone(socket) => {
                    self.kept.forget(socket);
                    self.narrow.remove(&socket);
                    self.let_go(now, socket);
                }
                Output::Listens(vm, at) => self.rules.note_listener(vm, at),
            }
        }
    }

    /// News for a guest go into its ring; whether all of them have.
    fn give_packets(&mut self, at: usize) -> bool {
        self.touch(at);
        let Self { host, devices, .. } = self;
        let Some(device) = devices.get_mut(at).and_then(Option::as_mut) else { return true };
        while host.has_packets(vm(at)) {
            if !device.has_place() {
                device.blocked = Some(Blocked::Ring);
                return false;
            }
            if let Some(packet) = host.poll_packet(vm(at)) {
                device.put(&packet);
            }
        }
        true
    }

    /// Nobody hears of this connection any more.
    fn reset(&mut self, now: Instant, (id, side): (ShadowId, Side)) {
        for to in [side, side.other()] {
            let message = Message { id, to, kind: Kind::Reset(Errno::Reset) };
            let _ = self.host.handle_message(now, HERE, &message);
        }
    }

    /// The driver of a guest, or its VMM, has gone.
    fn lose_guest(&mut self, now: Instant, at: usize) {
        self.forget(at);
        self.host.remove_guest(now, vm(at));
        self.hear(now);
    }

    /// The knowledge of a driver that has gone.
    fn forget(&mut self, at: usize) {
        let Some(device) = self.device_mut(at) else { return };
        device.forget();
        self.rules.stop(vm(at));
        self.kept.forget_receiver(at);
        self.stalled.retain(|(stalled, _)| *stalled != at);
    }

    /// Shows guests what there is for them, and sees to it that the worker wakes when they move.
    fn end_turn(&mut self, now: Instant) {
        while let Some(at) = self.touched.pop() {
            let stalls = self.stalled.iter().any(|(stalled, _)| *stalled == at);
            let reads = !stalls && !self.host.owes_answers(vm(at));
            let Some(device) = self.device_mut(at) else { continue };
            if device.blocked == Some(Blocked::Turn) {
                self.is_limited(now, at, Direction::ToGuest); // the rate may be spent since
            }
            let Some(device) = self.device_mut(at) else { continue };
            device.is_touched = false;
            let ((has_more, owes_signal), is_up) = (device.flush(), device.is_up);
            let is_owed = owes_signal && !std::mem::replace(&mut device.is_signalled_later, true);
            let reads = reads && !device.limits.is_spent(Direction::FromGuest);
            let reads = reads && is_up && !device.is_awake;
            if has_more || reads && device.port.enable_packet_kicks() {
                self.wake_device(at);
            }
            if is_owed {
                self.unsignalled.push_back((now + T_SIGNAL, at));
            }
            if self.device_mut(at).is_some_and(|device| is_up && !device.port.is_up()) {
                self.lose_guest(now, at); // it lied
            }
        }
        self.wake_stalled();
    }

    /// Of a VM's addresses these are others'.
    fn warn_of(&mut self, at: usize, others: &[IpAddr]) {
        for ip in others {
            if self.device_mut(at).is_some_and(|device| device.port.may_log()) {
                tracing::warn!(vm = at, %ip, "another VM has this address for its sockets");
            }
        }
    }

    fn wake_device(&mut self, at: usize) {
        if let Some(device) = self.device_mut(at)
            && device.is_up
            && !std::mem::replace(&mut device.is_awake, true)
        {
            self.awake.push_back(at);
        }
    }

    fn touch(&mut self, at: usize) {
        if let Some(device) = self.device_mut(at)
            && !std::mem::replace(&mut device.is_touched, true)
        {
            self.touched.push(at);
        }
    }

    fn device_mut(&mut self, at: usize) -> Option<&mut Device> {
        self.devices.get_mut(at)?.as_deref_mut()
    }
}

fn vm(at: usize) -> VmId {
    VmId(u32::try_from(at).expect("ports have 16 bits"))
}

/// Requests in a packet: each counts as another one.
const fn asks(header: &Header) -> u64 {
    if header.dst_port == control::PORT { header.len as u64 / control::LEN as u64 } else { 0 }
}

fn len_of(bytes: usize) -> u32 {
    u32::try_from(bytes).expect("no more than a packet has")
}
