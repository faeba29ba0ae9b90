//! All flows of a worker: a slab of slots and a hash index over it (LIFE-01, LIFE-02).
//!
//! Sizes per flow are summed in [`crate::limits`]. Memory is taken as flows come:
//!
//! - Slots live in chunks of [`CHUNK`], allocated one by one and never moved.
//! - The index ([`super::index`]) grows in shards, so little is moved at once.
//!
//! Nothing shrinks: a table that once held a million flows keeps their memory for the next ones.
//!
//! The flows of a port stand in rings, one per [`Class`], linked through their slots. Work for one
//! port visits that port's flows only (INV-20).
//!
//! The order of slots and rings depends only on the calls made, so a replay of the same calls
//! visits flows in the same order whatever the hash seeds are.

use ahash::RandomState;

use super::index::Index;
use super::key::FlowKey;
use crate::limits::FLOWS_MAX;

/// Slots per chunk.
const CHUNK: usize = 256;
const INDEX_BITS: u32 = 22;
const INDEX_MASK: u32 = (1 << INDEX_BITS) - 1;
/// Flows that the index is made for if there is room for fewer: 1,024 shards, 24 KiB.
const INDEXED_MIN: u32 = 1 << 20;
/// A slot that does not exist.
const NOWHERE: u32 = INDEX_MASK;

/// A flow of one [`FlowTable`]: slot index (22 bits) and the slot's generation (8 bits).
///
/// Valid until the flow is removed. After that it answers nothing until the slot was reused 256
/// times. The two highest bits are always 0.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct FlowId(pub(super) u32);

impl FlowId {
    /// No flow: answers nothing.
    pub(crate) const NONE: Self = Self(INDEX_MASK);

    fn new(index: u32, generation: u8) -> Self {
        Self(u32::from(generation) << INDEX_BITS | index)
    }

    /// The slot: below the table's capacity, dense from 0.
    #[must_use]
    pub fn index(self) -> usize {
        (self.0 & INDEX_MASK) as usize
    }

    fn generation(self) -> u32 {
        self.0 >> INDEX_BITS
    }
}

/// A key, and the hash that one table gives it.
#[derive(Clone, Copy, Debug)]
pub struct HashedKey {
    pub(crate) key: FlowKey,
    hash: u64,
    /// The slot where the flow most likely is.
    likely: u32,
}

/// Why there is no entry for a new flow; it must be PASS.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum TableFull {
    /// Every slot is in use.
    Table,
    /// This guest port has as many entries as it may (INV-20).
    Port,
}

/// The value of an entry when room is needed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Class {
    /// An incomplete handshake, perhaps a spoofed one.
    Unproven,
    /// In the path: it may owe something.
    Live,
    /// Out of the path: its connection works as well without it.
    Spent,
}

impl Class {
    const ALL: [Self; 3] = [Self::Unproven, Self::Live, Self::Spent];
}

#[derive(Debug)]
struct Slot<T> {
    key: FlowKey,
    /// Slots of the neighbours in the ring of this port and class.
    previous: u32,
    next: u32,
    generation: u8,
    class: Class,
    /// Looked up since the clock hand last passed.
    used: bool,
    value: Option<T>,
}

/// The flows of one port and class, in the order in which they became that.
#[derive(Clone, Copy, Debug)]
struct Ring {
    /// Slot of the oldest, where the clock hand is. Meaningless while `len` is 0.
    first: u32,
    len: u32,
}

#[derive(Clone, Copy, Debug)]
struct Port {
    flows_max: u32,
    rings: [Ring; Class::ALL.len()],
}

impl Port {
    const NEW: Self =
        Self { flows_max: u32::MAX, rings: [Ring { first: 0, len: 0 }; Class::ALL.len()] };

    fn flows(&self) -> u32 {
        self.rings.iter().map(|ring| ring.len).sum()
    }
}

/// Flows by key and by id. See the module doc.
#[derive(Debug)]
pub struct FlowTable<T> {
    chunks: Vec<Vec<Slot<T>>>,
    /// Free slots, last freed on top.
    free: Vec<u32>,
    /// Slots that were ever used.
    slots: u32,
    capacity: u32,
    len: u32,
    index: Index,
    hasher: RandomState,
    /// Per guest port.
    ports: Vec<Port>,
    /// Slots visited by walks and by the clock hand.
    #[cfg(test)]
    pub(crate) visited: std::cell::Cell<usize>,
}

impl<T> FlowTable<T> {
    /// An empty table of at most `capacity` flows (no more than [`FLOWS_MAX`]). `seeds` must be
    /// unpredictable for remotes, or they choose keys that collide. The index is made for a million
    /// at least: there may be more of them later ([`Self::set_capacity`]).
    #[must_use]
    pub fn new(capacity: u32, seeds: [u64; 4]) -> Self {
        let capacity = capacity.min(FLOWS_MAX);
        Self {
            chunks: Vec::new(),
            free: Vec::new(),
            slots: 0,
            capacity,
            len: 0,
            index: Index::new(capacity.max(INDEXED_MIN)),
            hasher: RandomState::with_seeds(seeds[0], seeds[1], seeds[2], seeds[3]),
            ports: Vec::new(),
            #[cfg(test)]
            visited: Default::default(),
        }
    }

    /// Flows in the table.
    #[must_use]
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Whether there is no flow.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Flows of one guest port.
    #[must_use]
    pub fn len_of_port(&self, port: u16) -> u32 {
        self.ports.get(usize::from(port)).map_or(0, Port::flows)
    }

    /// Flows of one guest port and class.
    #[must_use]
    pub fn len_of_class(&self, port: u16, class: Class) -> u32 {
        self.ports.get(usize::from(port)).map_or(0, |p| p.rings[class as usize].len)
    }

    /// Sets the number of flows allowed from now on (no more than [`FLOWS_MAX`]). Flows beyond it
    /// stay.
    pub fn set_capacity(&mut self, capacity: u32) {
        self.capacity = capacity.min(FLOWS_MAX);
    }

    /// Lets a guest port have at most `flows_max` entries. Those beyond stay until removed.
    pub fn set_quota(&mut self, port: u16, flows_max: u32) {
        self.port_mut(port).flows_max = flows_max;
    }

    /// The argument of [`Self::lookup_hashed`].
    #[must_use]
    pub fn hashed(&self, key: FlowKey) -> HashedKey {
        HashedKey { key, hash: self.hasher.hash_one(key), likely: NOWHERE }
    }

    /// Reads where a look-up of `key` begins.
    #[inline]
    #[must_use]
    pub fn fetch_index(&self, key: &HashedKey) -> u64 {
        self.index.first_word(key.hash)
    }

    /// Reads the slot that is most likely of the flow with this key, and notes it in the key.
    /// Returns the flow and the word that was read.
    #[inline]
    #[must_use]
    pub fn fetch_slot(&self, key: &mut HashedKey) -> Option<(&T, u64)> {
        key.likely = self.index.find(key.hash, |_| true)?;
        let slot = slot(&self.chunks, key.likely);
        let read = u64::from(slot.key.g_port) ^ u64::from(slot.used);
        Some((slot.value.as_ref()?, read))
    }

    /// The number of the slot that [`Self::fetch_slot`] noted, and the flow in it.
    #[inline]
    #[must_use]
    pub fn fetched(&self, key: &HashedKey) -> Option<(usize, &T)> {
        Some((key.likely as usize, self.slot_at(key.likely)?.value.as_ref()?))
    }

    /// The flow with this key. Counts as a use for eviction.
    #[must_use]
    pub fn lookup(&mut self, key: &FlowKey) -> Option<FlowId> {
        self.lookup_hashed(&self.hashed(*key)).map(|(id, ..)| id)
    }

    /// The same, its key and its state.
    #[inline(always)]
    #[must_use]
    pub fn lookup_hashed(&mut self, key: &HashedKey) -> Option<(FlowId, &FlowKey, &mut T)> {
        let index = match key.likely {
            NOWHERE => self.index.find(key.hash, |_| true)?,
            likely => likely,
        };
        // Two keys seldom have the same half of a hash, and flows seldom go within a batch.
        match self.slot_at(index) {
            Some(slot) if slot.key == key.key && slot.value.is_some() => self.use_slot(index),
            _ => self.lookup_again(key),
        }
    }

    #[cold]
    fn lookup_again(&mut self, key: &HashedKey) -> Option<(FlowId, &FlowKey, &mut T)> {
        let index = self.find(key.hash, &key.key)?;
        self.use_slot(index)
    }

    #[inline(always)]
    fn use_slot(&mut self, index: u32) -> Option<(FlowId, &FlowKey, &mut T)> {
        let slot = slot_mut(&mut self.chunks, index);
        slot.used = true;
        Some((FlowId::new(index, slot.generation), &slot.key, slot.value.as_mut()?))
    }

    /// The same without counting as a use.
    #[must_use]
    pub fn peek(&self, key: &FlowKey) -> Option<&T> {
        let index = self.find(self.hasher.hash_one(key), key)?;
        slot(&self.chunks, index).value.as_ref()
    }

    /// Whether [`Self::insert`] of a new key of this port would succeed.
    #[must_use]
    pub fn has_room(&self, port: u16) -> bool {
        let full = |p: &Port| p.flows() >= p.flows_max;
        self.len < self.capacity && !self.ports.get(usize::from(port)).is_some_and(full)
    }

    /// The same for so many.
    #[must_use]
    pub fn has_room_for(&self, port: u16, flows: usize) -> bool {
        let flows = u32::try_from(flows).unwrap_or(u32::MAX);
        let fits = |len: u32, most: u32| len.saturating_add(flows) <= most;
        let of_port = self.ports.get(usize::from(port));
        fits(self.len, self.capacity) && of_port.is_none_or(|p| fits(p.flows(), p.flows_max))
    }

    /// A new entry. If the key is there already, its value is replaced and its id stays.
    pub fn insert(&mut self, key: FlowKey, class: Class, value: T) -> Result<FlowId, TableFull> {
        let hash = self.hasher.hash_one(key);
        if let Some(index) = self.find(hash, &key) {
            let slot = slot_mut(&mut self.chunks, index);
            slot.value = Some(value);
            slot.used = true;
            let id = FlowId::new(index, slot.generation);
            self.set_class(id, class);
            return Ok(id);
        }
        let port = self.port_mut(key.port);
        if port.flows() >= port.flows_max {
            return Err(TableFull::Port);
        }
        if self.len >= self.capacity {
            return Err(TableFull::Table);
        }
        let index = self.free.pop().unwrap_or(self.slots);
        self.index.insert(hash, index);
        self.len += 1;
        let mut new = Slot {
            key,
            previous: index,
            next: index,
            generation: 0,
            class,
            used: true,
            value: Some(value),
        };
        let generation = if index < self.slots {
            let slot = slot_mut(&mut self.chunks, index);
            new.generation = slot.generation.wrapping_add(1);
            core::mem::replace(slot, new).generation.wrapping_add(1)
        } else {
            if (self.slots as usize).is_multiple_of(CHUNK) {
                self.chunks.push(Vec::with_capacity(CHUNK));
            }
            self.slots += 1;
            if let Some(chunk) = self.chunks.last_mut() {
                chunk.push(new);
            }
            0
        };
        self.link(index);
        Ok(FlowId::new(index, generation))
    }

    /// The flow is from now on the newest of `class`.
    pub fn set_class(&mut self, id: FlowId, class: Class) {
        let Some(slot) = self.slot_of_mut(id).filter(|slot| slot.value.is_some()) else { return };
        if slot.class != class {
            let index = id.0 & INDEX_MASK;
            self.unlink(index);
            slot_mut(&mut self.chunks, index).class = class;
            self.link(index);
        }
    }

    /// Takes the flow out. Cancel its timer as well.
    pub fn remove(&mut self, id: FlowId) -> Option<(FlowKey, T)> {
        let slot = self.slot_of_mut(id)?;
        let value = slot.value.take()?;
        let key = slot.key;
        let hash = self.hasher.hash_one(key);
        let index = id.0 & INDEX_MASK;
        self.index.remove(hash, index);
        self.unlink(index);
        self.free.push(index);
        self.len -= 1;
        Some((key, value))
    }

    /// The flow's state.
    #[must_use]
    pub fn get(&self, id: FlowId) -> Option<&T> {
        self.slot_of(id)?.value.as_ref()
    }

    /// The flow's state, to change.
    #[must_use]
    pub fn get_mut(&mut self, id: FlowId) -> Option<&mut T> {
        self.slot_of_mut(id)?.value.as_mut()
    }

    /// The flow's key and its state, to change.
    #[must_use]
    pub fn entry_mut(&mut self, id: FlowId) -> Option<(&FlowKey, &mut T)> {
        let slot = self.slot_of_mut(id)?;
        Some((&slot.key, slot.value.as_mut()?))
    }

    /// The flow's key.
    #[must_use]
    pub fn key(&self, id: FlowId) -> Option<&FlowKey> {
        self.slot_of(id).filter(|s| s.value.is_some()).map(|s| &s.key)
    }

    /// How many slots there are so far, taken or free: [`Self::at`] knows those below.
    #[must_use]
    pub fn slots(&self) -> usize {
        self.chunks.iter().map(|chunk| chunk.len()).sum()
    }

    /// All flows in slot order.
    pub fn iter(&self) -> impl Iterator<Item = (FlowId, &FlowKey, &T)> {
        (0_u32..).zip(self.chunks.iter().flatten()).filter_map(|(index, s)| {
            Some((FlowId::new(index, s.generation), &s.key, s.value.as_ref()?))
        })
    }

    /// The flow in a slot, if there is one ([`FlowId::index`]).
    #[must_use]
    pub fn at(&self, index: usize) -> Option<(FlowId, &FlowKey, &T)> {
        let slot = self.chunks.get(index / CHUNK)?.get(index % CHUNK)?;
        let index = u32::try_from(index).ok()?;
        Some((FlowId::new(index, slot.generation), &slot.key, slot.value.as_ref()?))
    }

    /// The flows of one port and class, the oldest first.
    pub fn of_class(&self, port: u16, class: Class) -> impl Iterator<Item = FlowId> {
        let ring = self
            .ports
            .get(usize::from(port))
            .map_or(Port::NEW.rings[0], |p| p.rings[class as usize]);
        let mut at = ring.first;
        (0..ring.len).map(move |_| {
            self.note_visit();
            let slot = slot(&self.chunks, at);
            FlowId::new(core::mem::replace(&mut at, slot.next), slot.generation)
        })
    }

    /// A flow of this port and class that `may_go` and that was not looked up since the clock hand
    /// last passed it (LIFE-02). Looks at `steps_max` flows at most; `None` if none of them is one.
    ///
    /// `may_go` decides what is quiescent: a flow that owes anybody anything must not go.
    pub fn find_unused(
        &mut self,
        port: u16,
        class: Class,
        steps_max: u32,
        mut may_go: impl FnMut(&T) -> bool,
    ) -> Option<FlowId> {
        for _ in 0..steps_max.min(self.len_of_class(port, class)) {
            self.note_visit();
            let ring = &mut self.ports[usize::from(port)].rings[class as usize];
            let index = ring.first;
            let slot = slot_mut(&mut self.chunks, index);
            ring.first = slot.next; // what the hand has passed is the last it comes to
            if core::mem::take(&mut slot.used) || !slot.value.as_ref().is_some_and(&mut may_go) {
                continue;
            }
            return Some(FlowId::new(index, slot.generation));
        }
        None
    }

    /// Puts the flow at the end of its ring.
    fn link(&mut self, index: u32) {
        let Slot { key, class, .. } = slot(&self.chunks, index);
        let ring = &mut self.ports[usize::from(key.port)].rings[*class as usize];
        ring.len += 1;
        if ring.len == 1 {
            ring.first = index;
        }
        let next = ring.first;
        let previous = if ring.len == 1 { index } else { slot(&self.chunks, next).previous };
        slot_mut(&mut self.chunks, previous).next = index;
        slot_mut(&mut self.chunks, next).previous = index;
        let slot = slot_mut(&mut self.chunks, index);
        (slot.previous, slot.next) = (previous, next);
    }

    fn unlink(&mut self, index: u32) {
        let Slot { key, class, previous, next, .. } = *slot(&self.chunks, index);
        let ring = &mut self.ports[usize::from(key.port)].rings[class as usize];
        ring.len -= 1;
        if ring.first == index {
            ring.first = next;
        }
        slot_mut(&mut self.chunks, previous).next = next;
        slot_mut(&mut self.chunks, next).previous = previous;
    }

    fn note_visit(&self) {
        #[cfg(test)]
        self.visited.set(self.visited.get() + 1);
    }

    #[inline]
    fn find(&self, hash: u64, key: &FlowKey) -> Option<u32> {
        self.index.find(hash, |i| slot(&self.chunks, i).key == *key)
    }

    #[inline]
    fn slot_at(&self, index: u32) -> Option<&Slot<T>> {
        self.chunks.get(index as usize / CHUNK)?.get(index as usize % CHUNK)
    }

    fn slot_of(&self, id: FlowId) -> Option<&Slot<T>> {
        let slot = self.chunks.get(id.index() / CHUNK)?.get(id.index() % CHUNK)?;
        (u32::from(slot.generation) == id.generation()).then_some(slot)
    }

    fn slot_of_mut(&mut self, id: FlowId) -> Option<&mut Slot<T>> {
        let slot = self.chunks.get_mut(id.index() / CHUNK)?.get_mut(id.index() % CHUNK)?;
        (u32::from(slot.generation) == id.generation()).then_some(slot)
    }

    fn port_mut(&mut self, port: u16) -> &mut Port {
        let port = usize::from(port);
        if self.ports.len() <= port {
            self.ports.resize(port + 1, Port::NEW);
        }
        &mut self.ports[port]
    }
}

/// The slot of an index that came out of the hash index or a ring: it exists.
fn slot<T>(chunks: &[Vec<Slot<T>>], index: u32) -> &Slot<T> {
    &chunks[index as usize / CHUNK][index as usize % CHUNK]
}

fn slot_mut<T>(chunks: &mut [Vec<Slot<T>>], index: u32) -> &mut Slot<T> {
    &mut chunks[index as usize / CHUNK][index as usize % CHUNK]
}

#[cfg(test)]
mod tests;
