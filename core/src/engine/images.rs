//! Flows that go on in another engine: of the next process, or of another host (`tcp::saved`).
//!
//! ```text
//! magic 8 B | version 4 B | length 4 B | checksum 8 B | VM | flows | turns
//! ```
//!
//! The checksum guards against damage, not against forgery. Turns are the flows' places in the
//! lists of the engine, by their numbers in the image: an ACK due at the end of the batch, frames
//! for the guest.

use std::collections::BTreeMap;

use crate::drops::DropReason;
use crate::engine::{Engine, context};
use crate::flow::key::FlowKey;
use crate::flow::table::{Class, FlowId};
use crate::limits::IMAGE_BYTES_MAX;
use crate::port::PortId;
use crate::tcp::flow::Flow;
use crate::tcp::saved::Arrival;
use crate::tcp::vm::MovedVm;
use crate::time::Instant;
use crate::wire::packet::{Eth, IpAddr16};
use crate::wire::saved::{BadImage, Clocks, Reader, Saved, Writer};

const MAGIC: [u8; 8] = *b"NPIMAGE\n";
/// Raised whenever an image changes, in what it has or in what that means.
const VERSION: u32 = 2;
const HEADER: usize = 24;

/// Why a VM's flows have no image now.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ExportError {
    /// The port is no guest's.
    NoGuest,
    /// H sends for some of them: hand them back first ([`Engine::hand_back`]).
    SentFor,
    /// They hold more than an image has room for, which a budget allows: drain the VM.
    TooLarge,
}

/// Why the flows of an image cannot go on here. Nothing has changed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ImportError {
    /// The port is no guest's.
    NoGuest,
    /// See [`BadImage`].
    Bad(BadImage),
    /// The guest may not use the addresses of one of them.
    Spoofed(DropReason),
    /// The guest has a connection with the same addresses and ports here.
    InUse,
    /// The VM's budget, the table or the arena has too little room for all of them.
    NoRoom,
}

/// Records and pages that are left for flows that arrive.
struct Room {
    records: usize,
    pages: u64,
}

impl Room {
    /// One of the flows finds its place.
    fn take(&mut self, arrival: &Arrival<'_>) -> Option<()> {
        self.records = self.records.checked_sub(usize::from(arrival.has_record))?;
        self.pages = self.pages.checked_sub(arrival.flow.place_pages())?;
        Some(())
    }
}

impl From<BadImage> for ImportError {
    fn from(bad: BadImage) -> Self {
        Self::Bad(bad)
    }
}

/// The flows that have arrived.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Imported {
    /// Flows in the path, and others.
    pub flows: usize,
    /// Of these, flows that had to be reset.
    pub reset: usize,
}

/// Of everything behind it in an image.
fn checksum(body: &[u8]) -> u64 {
    let mut sum = 0x9e37_79b9_7f4a_7c15_u64 ^ body.len() as u64;
    for word in body.chunks(8) {
        let mut padded = [0; 8];
        padded[..word.len()].copy_from_slice(word);
        sum = (sum ^ u64::from_le_bytes(padded)).wrapping_mul(0xff51_afd7_ed55_8ccd);
        sum ^= sum >> 32;
    }
    sum
}

impl Engine<'_> {
    /// H sends for no flow of the VM of `port` from here on; its guest repeats what R was not sent.
    /// It is for a VM that stands: one that runs is to be handed back when nothing is under way
    /// (FLOOD-32, [`Self::set_congestion_offload`]). H begins anew with the next data of each flow.
    pub fn hand_back(&mut self, now: Instant, port: PortId) {
        self.for_each(port, Class::Live, |engine, id| {
            engine.with_flow(now, id, Flow::hand_back_now);
            engine.common.out.departures.leave(port, id);
        });
    }

    /// The image of a VM: all of its flows, with the bytes that they hold. It is to be taken when
    /// [`Self::poll_transmit`] has nothing more. Nothing changes here; of the two engines only one
    /// may go on (LIFE-07).
    ///
    /// # Errors
    /// See [`ExportError`].
    pub fn export(&self, now: Instant, port: PortId) -> Result<Vec<u8>, ExportError> {
        self.export_flows(now, port, &self.flows_to_move(port))
    }

    /// The same with one of its flows.
    ///
    /// # Errors
    /// See [`ExportError`].
    pub fn export_flow(&self, now: Instant, id: FlowId) -> Result<Vec<u8>, ExportError> {
        let key = self.flows.key(id).ok_or(ExportError::NoGuest)?;
        self.export_flows(now, PortId(key.port), &[id])
    }

    /// The flows of the VM of `port` go on elsewhere: here they go, and nobody is told (LIFE-07).
    pub fn forget(&mut self, port: PortId) {
        // The newest first: those that come back find their places.
        for id in self.flows_to_move(port).into_iter().rev() {
            self.remove_flow(id);
        }
        if let Some(p) = self.port_mut(port) {
            p.vm.ready.clear();
        }
    }

    /// All flows of a VM, in the order in which they became what they are. The other engine keeps
    /// it.
    fn flows_to_move(&self, port: PortId) -> Vec<FlowId> {
        let of = |class| self.flows.of_class(port.0, class);
        [Class::Unproven, Class::Live, Class::Spent].into_iter().flat_map(of).collect()
    }

    fn export_flows(
        &self,
        now: Instant,
        port: PortId,
        ids: &[FlowId],
    ) -> Result<Vec<u8>, ExportError> {
        let vm = self.vm(port).ok_or(ExportError::NoGuest)?;
        let mut image = Writer::new(Clocks { now, running: vm.clock.now(now) });
        image.put(&[0; HEADER]);
        vm.saved(&mut image);
        u32::try_from(ids.len()).unwrap_or(u32::MAX).saved(&mut image);
        for &id in ids {
            let (Some(key), Some(flow)) = (self.flows.key(id), self.flows.get(id)) else {
                continue;
            };
            if flow.is_sent_for() {
                return Err(ExportError::SentFor);
            }
            flow.saved(key, &self.common.arena, &mut image);
            if image.len() > IMAGE_BYTES_MAX {
                return Err(ExportError::TooLarge);
            }
        }
        let places: BTreeMap<FlowId, u32> = ids.iter().copied().zip(0..).collect();
        let numbers = |list: &mut dyn Iterator<Item = &FlowId>| -> Vec<u32> {
            list.filter_map(|id| places.get(id).copied()).collect()
        };
        put_numbers(&numbers(&mut self.common.ack_list.iter()), &mut image);
        put_numbers(&numbers(&mut vm.ready.iter()), &mut image);
        let mut image = image.into_bytes();
        seal_image(&mut image);
        Ok(image)
    }

    /// The flows of an image go on here, as those of the VM of `port`: it has no others that are in
    /// the path, or only the times of these are the VM's own.
    ///
    /// # Errors
    /// See [`ImportError`].
    pub fn import(
        &mut self,
        now: Instant,
        port: PortId,
        image: &[u8],
    ) -> Result<Imported, ImportError> {
        let vm = self.vm(port).ok_or(ImportError::NoGuest)?;
        let own = vm.clock.now(now);
        let is_empty = self.flows.len_of_class(port.0, Class::Live) == 0;
        let mut image = Reader::new(opened(image)?, Clocks { now, running: own });
        let moved = MovedVm::of_saved(&mut image)?;
        let running = if is_empty { own.max(moved.running(now)) } else { own };
        image.set_running(running);
        let count = usize::try_from(u32::of_saved(&mut image)?).unwrap_or(usize::MAX);
        let mut room = self.room_for(port, count).ok_or(ImportError::NoRoom)?;
        let mut arrivals = Vec::new();
        for _ in 0..count {
            let arrival = Arrival::of_saved(&mut image, port.0)?;
            room.take(&arrival).ok_or(ImportError::NoRoom)?;
            arrivals.push(arrival);
        }
        let acks = take_numbers(&mut image, count)?;
        let ready = take_numbers(&mut image, count)?;
        if image.left() > 0 {
            return Err(BadImage::Damaged.into());
        }
        let sources = self.check_arrivals(port, &arrivals)?;
        self.networks.of_mut(port).learn_arrivals(now, port, &sources);
        if is_empty && let Some(p) = self.port_mut(port) {
            p.vm.go_on(now, running, moved);
        }
        let mut imported = Imported { flows: arrivals.len(), reset: 0 };
        let mut ids = Vec::new();
        for arrival in arrivals {
            let id = self.admit(now, arrival, &mut imported.reset);
            ids.push(id.unwrap_or(FlowId::NONE));
        }
        for id in acks.into_iter().map(|n| ids[n]) {
            self.with_arrival(now, id, |flow, cx| flow.enter_ack_list(cx));
        }
        for id in ready.into_iter().map(|n| ids[n]) {
            self.with_arrival(now, id, |flow, cx| flow.want_delivery_again(cx));
        }
        self.announce_ready(port);
        Ok(imported)
    }

    /// The room that flows of the VM of `port` find here, if there is room for so many.
    fn room_for(&self, port: PortId, flows: usize) -> Option<Room> {
        let vm = self.vm(port)?;
        let arena = &self.common.arena;
        let in_budget = vm.budget_pages.saturating_sub(vm.reserved_pages);
        let pages = in_budget.min(arena.free_pages() as u64);
        let room = Room { records: arena.free_records(), pages };
        self.flows.has_room_for(port.0, flows).then_some(room)
    }

    /// No other flow is in their place, and the guest may use their addresses, which are these.
    fn check_arrivals(
        &self,
        port: PortId,
        arrivals: &[Arrival<'_>],
    ) -> Result<Vec<(Eth, IpAddr16)>, ImportError> {
        let mut keys: Vec<&FlowKey> = arrivals.iter().map(|arrival| &arrival.key).collect();
        keys.sort_unstable_by_key(|key| (key.r_addr, key.g_addr, key.r_port, key.g_port, key.vlan));
        let is_twice = keys.windows(2).any(|pair| pair[0] == pair[1]);
        let is_live = |arrival: &Arrival<'_>| {
            self.flows.peek(&arrival.key).is_some_and(|flow| !flow.owes_nothing() || flow.is_live())
        };
        if is_twice || arrivals.iter().any(is_live) {
            return Err(ImportError::InUse);
        }
        let source = |Arrival { key, flow, .. }: &Arrival<'_>| Some((flow.eth(key)?, key.g_addr));
        let sources: Option<Vec<_>> = arrivals.iter().map(source).collect();
        let sources = sources.ok_or(BadImage::Impossible("Template"))?;
        self.networks.of(port).check_arrivals(port, &sources).map_err(ImportError::Spoofed)?;
        Ok(sources)
    }

    /// A flow takes its place in this engine.
    fn admit(&mut self, now: Instant, arrival: Arrival<'_>, reset: &mut usize) -> Option<FlowId> {
        let bytes = arrival.bytes();
        let Arrival { key, flow, has_record, .. } = arrival;
        if let Some(id) = self.flows.lookup(&key) {
            self.remove_flow(id); // it was of an earlier connection
        }
        let id = self.flows.insert(key, flow.class(), flow).ok()?;
        let taken = self
            .with_arrival(now, id, |flow, cx| Arrival::take_place(flow, cx, has_record, bytes))?;
        let wake_at = self.flows.get(id)?.wakes_at();
        self.timers.schedule(id, wake_at);
        if !taken {
            *reset += 1;
            self.with_flow(now, id, Flow::on_no_place);
        }
        Some(id)
    }

    /// A flow is as it was in the other engine; nothing happens to it.
    fn with_arrival<R>(
        &mut self,
        now: Instant,
        id: FlowId,
        f: impl FnOnce(&mut Flow, &mut crate::tcp::FlowContext<'_, '_>) -> R,
    ) -> Option<R> {
        let (key, flow) = self.flows.entry_mut(id)?;
        let mut cx = context(now, id, key, &mut self.ports, &mut self.common)?;
        Some(f(flow, &mut cx))
    }

    #[cfg(test)]
    pub(crate) fn known_mac(&self, port: PortId) -> Option<crate::switch::Mac> {
        self.networks.of(port).mac_of(port)
    }

    fn announce_ready(&mut self, port: PortId) {
        let Some(p) = self.ports.get_mut(usize::from(port.0)).and_then(Option::as_mut) else {
            return;
        };
        if !p.vm.ready.is_empty() && !std::mem::replace(&mut p.vm.announced, true) {
            self.common.ready_ports.push_back(port);
        }
    }
}

/// Writes the header of an image, whose place its first bytes are.
///
/// # Panics
/// If there are fewer bytes than a header has.
pub fn seal_image(image: &mut [u8]) {
    let len = u32::try_from(image.len()).unwrap_or(u32::MAX);
    let (header, body) = image.split_at_mut(HEADER);
    header[..8].copy_from_slice(&MAGIC);
    header[8..12].copy_from_slice(&VERSION.to_le_bytes());
    header[12..16].copy_from_slice(&len.to_le_bytes());
    header[16..].copy_from_slice(&checksum(body).to_le_bytes());
}

/// The bytes behind the header of a whole image.
fn opened(image: &[u8]) -> Result<&[u8], BadImage> {
    let (header, body) = image.split_first_chunk::<HEADER>().ok_or(BadImage::NotAnImage)?;
    let (words, _) = header.as_chunks::<4>();
    let word = |at: usize| u32::from_le_bytes(words[at]);
    if header[..8] != MAGIC {
        return Err(BadImage::NotAnImage);
    }
    if word(2) != VERSION {
        return Err(BadImage::OtherVersion(word(2)));
    }
    let sum = u64::from(word(5)) << 32 | u64::from(word(4));
    let is_whole = u32::try_from(image.len()) == Ok(word(3)) && image.len() <= IMAGE_BYTES_MAX;
    if is_whole && sum == checksum(body) { Ok(body) } else { Err(BadImage::Damaged) }
}

fn put_numbers(numbers: &[u32], image: &mut Writer) {
    u32::try_from(numbers.len()).unwrap_or(u32::MAX).saved(image);
    numbers.iter().for_each(|number| number.saved(image));
}

/// Numbers below `count`.
fn take_numbers(image: &mut Reader<'_>, count: usize) -> Result<Vec<usize>, BadImage> {
    let len = u32::of_saved(image)?;
    let number = |_| {
        let number = usize::try_from(u32::of_saved(image)?).unwrap_or(usize::MAX);
        if number < count { Ok(number) } else { Err(BadImage::Impossible("turns")) }
    };
    (0..len).map(number).collect()
}
