//! Every bound in one place, with its arithmetic (INV-06, INV-20, LIFE-01).
//!
//! A bound that a guest or a remote can push against is a number here, never "as much as fits".

use crate::time::Duration;

// --- Bytes -------------------------------------------------------------------------------------

/// Bytes of one store page: what the arena hands out and a flow pays for.
///
/// 16 KiB holds eleven 1448-byte segments or a quarter of a 64 KiB super-segment; a window of n
/// bytes at any alignment wastes less than two pages.
pub const PAGE: usize = 16 * 1024;
/// The smallest window a flow with ack offload has, reserved for it (SNOOP-09).
pub const FLOW_BUFFER_MIN: u64 = 64 * 1024;
/// The initial buffer of a flow if the VM's budget allows it (SNOOP-39).
pub const FLOW_BUFFER_INITIAL: u64 = 256 * 1024;
/// The largest buffer of a flow that grows because R filled it, before G has drained it, once G has
/// proved to be ESTABLISHED (SNOOP-39): the data that R sends in 10 ms at 1 Gbit/s. While G is
/// known to be off its core more is lent.
pub const FLOW_BUFFER_AHEAD_MAX: u64 = 1024 * 1024;
/// G may be shown so much more room than R has shown (FLOOD-14): the data that it hands over in a
/// slice.
pub const OUTBOUND_AHEAD_MAX: u64 = 1024 * 1024;
/// The largest buffer of a flow that grows because R filled it (SNOOP-39): more would only add
/// delay.
pub const FLOW_BUFFER_DOUBLED_MAX: u64 = 4 * 1024 * 1024;
/// The largest buffer of a flow that grows because G itself shows as much: all that Linux shows
/// with a `tcp_rmem` of 32 MiB. A flow whose G shows more is let go.
pub const FLOW_BUFFER_MAX: u64 = 32 * 1024 * 1024;
/// The most bytes of a flow that ends in a container of the guest that are acknowledged early and
/// held (FWD-02). While there are more, it acknowledges late.
pub const PROMISED_BEHIND_MAX: u64 = FLOW_BUFFER_INITIAL;
/// It acknowledges early again when no more are held than these.
pub const PROMISED_BEHIND_AGAIN: u64 = PROMISED_BEHIND_MAX / 2;
/// The bytes that a VM's flows may hold and promise together unless configured otherwise (INV-06).
pub const VM_BUDGET: u64 = 64 * 1024 * 1024;
/// One part in so many of a VM's budget is for windows of [`FLOW_BUFFER_MIN`] alone (INV-20): 1024
/// of 4096 pages, for 204 flows that find theirs whatever the others have.
pub const BUDGET_FOR_FIRST_WINDOWS: u64 = 4;
/// Out-of-order ranges per flow (SNOOP-10). Their bytes need no bound of their own: the whole
/// window is reserved.
pub const OOO_RANGES_MAX: usize = 64;
/// The longest L2 header that is rebuilt: two MACs, two VLAN tags, the EtherType.
pub const L2_MAX: usize = 6 + 6 + 2 * 4 + 2;
/// The longest frame: a super-segment of 64 KiB behind an L2 header, and then some.
pub const FRAME_BYTES_MAX: usize = 68 * 1024;
/// A guest's MTU unless it is configured: Ethernet's.
pub const MTU_DEFAULT: u16 = 1500;
/// Bytes after which no more is read from a port in a turn. A guest works on these while the next
/// turn reads. With 64 super-segments first, 4 MB, both waited for each other.
pub const BYTES_PER_PORT: usize = 128 * 1024;
/// Bytes of copies that may be made of a port's frames in a turn, for all receivers: each receiver
/// of a broadcast gets one, and a receiver that takes no super-segments gets it in pieces. The
/// excess counts in the turns after it, in which nothing is read from the port. The limit is so
/// high that neither 64 small broadcasts to 50 guests nor two super-segments for a guest that takes
/// none reach it.
pub const COPIES_PER_PORT: usize = 8 * BYTES_PER_PORT;
/// The cost of a copy besides its bytes: a place in a ring, headers and a checksum.
pub const COPY_COST: usize = 256;
/// The longest frame to a group: a jumbo frame with a VLAN tag. Copies of 64 KiB for 200 guests
/// took milliseconds.
pub const GROUP_BYTES_MAX: usize = 9216 + 18;
/// Frames to groups that a guest may send at once. A guest that starts sends some dozen; a host of
/// containers, that starts all of them, some hundred.
pub const GROUP_FRAMES_BURST: u64 = 1000;
/// Then one in this time: 10,000 a second, of full frames 120 Mbit/s.
pub const GROUP_FRAMES_INTERVAL: Duration = Duration::from_micros(100);
/// Frames of backlogs together: a port may have as much as all of them leave free, so that 15 take
/// [`BACKLOG_BYTES_MAX`] each, and 200 about 320 KB.
pub const BACKLOGS_BYTES_MAX: usize = 64 << 20;
/// Bytes of frames after which no more join a batch that is looked through together: with long
/// frames copying costs more than waiting for memory, and the frames that were read should not
/// leave the cache.
pub const BATCH_BYTES: usize = 32 * 1024;
/// Bytes of backlog and store after which a guest gets no more in a turn. Twice the bytes that a
/// port may bring, so that the backlog shrinks while as much comes in.
pub const BYTES_PER_GUEST: u64 = 2 * BYTES_PER_PORT as u64;
/// Bytes that guests have handed over, and that leave for their remotes in a turn: the rest leaves
/// in the next, so that reading is not kept waiting.
pub const BYTES_OF_DEPARTURES: usize = 1024 * 1024;
/// Bytes that one VM sends to remotes before the next one does (FLOOD-16): a super-segment.
pub const TURN_BYTES: i64 = 64 * 1024;
/// And frames at most: 1 MiB of a guest's small segments would be a million.
pub const FRAMES_OF_DEPARTURES: u64 = 1024;
/// Bytes of frames that wait for the ring of one guest: 64 super-segments of 64 KiB.
pub const BACKLOG_BYTES_MAX: usize = 4 << 20;

// --- Counts ------------------------------------------------------------------------------------

/// Frames a worker reads from one port before the others have their turn.
pub const FRAMES_PER_PORT: usize = 64;
/// Frames that are looked through before the first of them is worked on. A core has some ten cache
/// lines under way at a time; 32 frames, a few lines each, keep it busy.
pub const BATCH_FRAMES: usize = 32;
/// With fewer flows than this, frames are not read in batches: flows are in the cache then, and a
/// frame that is processed as soon as it is read is in the nearest one. 2048 flows with their
/// records take 1.2 MB, which a core of today has for itself.
pub const FLOWS_IN_CACHE: u32 = 2048;
/// Frames that wait for the ring of one guest: as many as a Linux tap queues (`txqueuelen` 1000,
/// drivers/net/tun.c).
pub const BACKLOG_FRAMES_MAX: usize = 1000;

/// Bytes that leave for R at once at most, unless its round trip is shorter than a millisecond: a
/// super-segment.
pub const PACED_BURST_MAX: u64 = 64 * 1024;
/// Pieces of a frame that the engine made: the headers and the pages that 64 KiB of payload touch,
/// which are five at most.
pub const TRANSMIT_PARTS_MAX: usize = 8;
/// Flows that are processed at once, as when the link of their VM comes up or the daemon stops.
/// More are processed in steps, each of which looks at so many places.
pub const FLOWS_PER_STEP: u32 = 2048;
/// Timers run per call of `handle_timeout`; the rest comes with the next call at once (LIFE-11).
pub const TIMERS_PER_CALL: usize = 4096;
/// Retransmission timeouts toward R in a row after which H stops sending for G, whose own copies
/// flow again (FLOOD-23): as many as Linux tries (`tcp_retries2`), a quarter of an hour.
pub const WIRE_TIMEOUTS_MAX: u8 = 15;
/// Probes of a window that R has taken back after which H stops sending for G: 200 ms more than the
/// round trip, doubled each time, are 6 s. G knows of the window then, and probes it by itself. So
/// many timeouts end it too for a flow that is to be handed back.
pub const WINDOW_PROBES_MAX: u8 = 5;
/// Turns in a row without a frame after which a port is not read again unless it wakes the worker.
/// A read of an empty port costs some 50 ns; 64 turns are longer than the usual window of polling.
pub const IDLE_TURNS_MAX: u8 = 64;

/// Flow entries per VM unless configured otherwise (LIFE-01).
pub const FLOWS_PER_VM: u32 = 16_384;
/// The part of a VM's flow entries for incomplete handshakes: 2048 of 16,384, one of less than 16
/// (LIFE-01).
///
/// Such an entry lives for a round trip. So 2048 are enough for 10,000 new connections per second
/// at 200 ms, and a flood of spoofed SYNs that the guest answers gets no more.
#[must_use]
pub const fn handshakes_max(flows_max: u32) -> u32 {
    if flows_max < 16 { 1 } else { flows_max / 8 }
}
/// Flows of a VM looked at for one that may go, when a new one needs its place (LIFE-02).
pub const VICTIM_STEPS_MAX: u32 = 64;
/// Flow entries one table can address: `FlowId` has 22 index bits, the last index is a marker.
pub const FLOWS_MAX: u32 = (1 << 22) - 1;
/// SYN records per guest port: 1024 x 32 B = 32 KiB, taken at the first SYN (LIFE-01).
///
/// A record lives from R's SYN to G's SYN-ACK. With G off its CPU for 100 ms this is enough for
/// 10,000 connection attempts per second; beyond that random ones become PASS.
pub const SYN_RECORDS_PER_PORT: usize = 1024;
/// ACKs of R in a row for what H did not see G send, none of them denied by G: then H believes them
/// (SNOOP-42). An attacker that guesses sequence and ACK within windows of 64 KiB hits once in 2^32
/// attempts, within 4 MiB once in 2^20; and has to hit so often before R or G say anything.
pub const AHEAD_ACKS: u8 = 3;
/// For each of these ACKs G may have sent so many times R's largest window more: G is shown them,
/// and R's window may have grown.
pub const AHEAD_WINDOWS: u64 = 4;
/// Segments that a sender may send after a pause (RFC 5681 section 4.1, RFC 6928): a parked flow's
/// G must have room for them.
pub const RESTART_SEGMENTS: u64 = 10;
/// ACKs that are sent at once at the beginning of a connection, as Linux does (SNOOP-07).
pub const QUICK_ACKS: u8 = 16;
/// Ends of segments of G that are remembered, to send small ones as they came (FLOOD-07): 8 KiB.
pub const SEGMENT_ENDS_MAX: usize = 1024;
/// Runs of bytes that are kept for each segment under way to R. SACK blocks that would cut them
/// into more are ignored. An honest R cuts at segments.
pub const SENT_RUNS_PER_SEGMENT: u64 = 2;
/// So many are kept however little is under way: 16 runs of 24 bytes.
pub const SENT_RUNS_MIN: u64 = 16;
/// The most that are kept: an ACK with SACK blocks looks at each, and R chooses how many there are.
/// 2048 holes are the losses of one segment in 100 of a window of 290 MB.
pub const SENT_RUNS_MAX: u64 = 4096;
/// Copies of a repair that are remembered, neighbours as one, until each is known to have been
/// needless (FLOOD-44): 2 KiB, while there is a repair. A repair of more is not undone.
pub const REMEMBERED_COPIES_MAX: usize = 64;
/// The most segments without SACK that may overtake one before it counts as lost (FLOOD-45).
/// Linux: `tcp_max_reordering`.
pub const REORDERING_MAX: u64 = 300;
/// First windows of senders that must be free; otherwise a VM's guest is told to stop flooding
/// (FLOOD-28). So many connections may begin until the guest knows.
pub const FLOODING_PLACES: u64 = 8;
/// Refusals remembered per VM (SNOOP-32).
pub const REFUSALS_PER_VM: usize = 64;
/// Stations heard behind uplinks, or behind the peers of an overlay.
pub const MACS_MAX: usize = 8192;
/// Stations that an overlay was told of, besides those that it has heard. With MACS_MAX that is a
/// table of 131,072 x 25 B = 3.1 MiB, and one as large in the switch.
pub const TOLD_MAX: usize = 1 << 16;
/// Entries for those behind uplinks: one that is heard with a VLAN tag has two. 16,384 x 32 B =
/// 512 KiB.
pub const MAC_ENTRIES_MAX: usize = 2 * MACS_MAX;
/// Bytes of datagrams that leave an overlay by one call: the most that UDP over IPv4 holds (65,535
/// minus both headers).
pub const OVERLAY_DATAGRAM_BYTES_MAX: usize = 65_507;
/// How long a path between hosts stays as narrow as it was found (Linux:
/// `net.ipv4.route.mtu_expires`).
pub const PATH_MTU_AGE: Duration = Duration::from_secs(600);
/// How often a path between hosts that takes all is asked whether it still does: transfers hang so
/// long, and [`PROBE_TRIES`], where it does not any more. Two packets each time.
pub const PROBE_INTERVAL: Duration = Duration::from_secs(10);
/// How long a peer that answered probes before may be away until it is asked once more.
pub const PROBE_AWAY: Duration = Duration::from_secs(60);
/// How long an answer to a probe may take, and how often one is sent before it is lost (RFC 8899
/// sections 5.1.1 and 5.1.2: PROBE_TIMER, MAX_PROBES).
pub const PROBE_WAIT: Duration = Duration::from_secs(1);
/// See [`PROBE_WAIT`].
pub const PROBE_TRIES: u8 = 3;
/// A search for the width of a path ends so many bytes below it.
pub const PROBE_STEP: u16 = 8;
/// Errors at once for senders over an overlay whose packets are too long.
pub const TOO_LONG_BURST: u64 = 50;
/// Senders that do not take them from each other, as far as their MACs' hashes differ: 64 x 40 B.
pub const TOO_LONG_SENDERS: usize = 64;
/// Then one in this time. Each is shorter than its packet, so this only bounds the work.
pub const TOO_LONG_INTERVAL: Duration = Duration::from_millis(10);
/// Datagrams that leave by one call (`UDP_MAX_SEGMENTS`, linux/udp.h up to 6.8).
pub const OVERLAY_DATAGRAMS_MAX: usize = 64;
/// Servers of a guest that are known not to be plain local ones (FWD-01): 128 x 80 B = 10 KiB.
pub const SERVERS_PER_VM: usize = 128;
/// The last answers of each that are known (FWD-01).
pub const ANSWERS_KNOWN: usize = 16;
/// An answer of a container takes so many milliseconds at most, if its guest is on its CPU: a hop
/// inside the guest takes some 50 us (FWD-01).
pub const NEAR_ANSWER_MS: u16 = 2;
/// Source IPs that are learned of a guest port without a configured list; it owns these (COM-11).
pub const LEARNED_IPS_PER_PORT: usize = 16;

// --- The monitor -------------------------------------------------------------------------------

/// Connections that a monitor watches at once: [`MONITOR_FLOW_BYTES`] each are 152 MiB if all of
/// them are seen at both sides of their ports, and less than half as much if at one.
pub const MONITOR_FLOWS_MAX: usize = 4096;
/// Bytes of a watched connection that is seen at both sides of its port, at most.
pub const MONITOR_FLOW_BYTES: usize = 38 * 1024;
/// VMs that a monitor knows: as many as the ports of a large host, 256 bytes each.
pub const MONITOR_VMS_MAX: usize = 1024;
/// Bytes of frames' headers that wait for a monitor: 168 for each frame are 12,483 frames, and 12
/// ms at 1 Mpps.
pub const MONITOR_LOG_BYTES: usize = 2 << 20;

// --- The cost of one flow ------------------------------------------------------------------------

/// Bytes of a flow table slot besides the caller's `T`: key 48, neighbours in its ring 8,
/// generation and marks 8.
pub const FLOW_SLOT_OVERHEAD: usize = 64;
/// Bytes of the hash index per flow at its emptiest: 8 B at 3/8 load.
pub const FLOW_INDEX_BYTES: usize = 22;
/// Bytes of a flow's place in the timing wheel (SEC-12).
pub const FLOW_TIMER_BYTES: usize = 12;
/// Bytes of a flow's record in the arena; only flows that owe something, or did within
/// [`T_PARK`], have one.
pub const FLOW_RECORD_BYTES: usize = 176;
/// The caller's state per flow that the memory target below is stated for.
pub const FLOW_STATE_BYTES: usize = 328;
/// When H's last ACKs of a flow left, for samples of what is saved (`tcp/lead.rs`).
pub const ACK_MOMENTS_BYTES: usize = 68;
/// Sends of a VM's flows, by ACKs that its guest has yet to see, that are timed at once.
pub const LEAD_SENDS_MAX: usize = 16;
/// The memory of the path of an idle flow for which the daemon has sent.
pub const SENDER_MEMORY_BYTES: usize = 768;
/// A tracked flow that owes nothing and was idle for [`T_PARK`].
pub const FLOW_BYTES_IDLE: usize =
    FLOW_SLOT_OVERHEAD + FLOW_INDEX_BYTES + FLOW_TIMER_BYTES + FLOW_STATE_BYTES + ACK_MOMENTS_BYTES;

// --- Times -------------------------------------------------------------------------------------

/// Challenge and odd ACKs: at most one per flow in this time (COM-31).
pub const ODD_ACK_INTERVAL: Duration = Duration::from_millis(500);
/// A host that controls a guest's congestion sends a heartbeat this often (FLOOD-28).
pub const HEARTBEAT_PERIOD: Duration = Duration::from_millis(500);
/// A guest without a heartbeat for so long has stopped flooding (FLOOD-28): three heartbeats in a
/// row may be lost.
pub const HEARTBEAT_STALE: Duration = Duration::from_secs(2);
/// Local retransmission toward G: first timeout, in running time (SNOOP-29).
pub const LOCAL_RTO_MIN: Duration = Duration::from_millis(250);
/// Local retransmission toward G: longest timeout, in running time (SNOOP-29).
pub const LOCAL_RTO_MAX: Duration = Duration::from_secs(2);
/// Knowledge of the way behind G from a loss there is forgotten after so much running time without
/// another (FWD-04).
pub const GUEST_PATH_AGE: Duration = Duration::from_secs(10);
/// An answer of G that takes so much running time at the least is no local one: delayed ACKs are
/// sent after 40 to 200 ms, but not always (FWD-01).
pub const GUEST_ROUND_TRIP_LONG: Duration = Duration::from_millis(50);
/// Segments that may be under way on it, however much is lost (RFC 5681 section 3.1: ssthresh).
pub const GUEST_PATH_SEGMENTS_MIN: u64 = 2;
/// The longest image of a VM: the largest budget that a move in 100 ms allows, and 100,000 flows.
pub const IMAGE_BYTES_MAX: usize = 512 << 20;
/// Of an image (LIFE-09): a frame whose bytes passed to G may end so far beyond the edge.
pub const ANSWERED_AHEAD_MAX: u64 = 2 * FRAME_BYTES_MAX as u64;
/// Of an image: counts of a flow that may still be counted up.
pub const RETRANSMISSIONS_MAX: u32 = u32::MAX / 2;
/// The least packets that every way behind G takes: 576 bytes with an MSS of 536 (RFC 9293 section
/// 3.7.1), and 1280 with 1220 (RFC 8200 section 5).
pub const GUEST_PATH_MTU_MIN: [u16; 2] = [576, 1280];
/// Retransmission timeout toward R before the first round trip is known (RFC 6298 section 2.1).
pub const WIRE_RTO_INITIAL: Duration = Duration::from_secs(1);
/// The same if the SYN or SYN-ACK had to be repeated (RFC 6298 section 5.7).
pub const WIRE_RTO_AFTER_SYN: Duration = Duration::from_secs(3);
/// It is at least this much longer than the smoothed round trip: in place of the second that RFC
/// 6298 section 2.4 recommends, as Linux has it (`TCP_RTO_MIN`). It covers delayed ACKs (FLOOD-23).
pub const WIRE_RTO_VARIANCE_MIN: Duration = Duration::from_millis(200);
/// The longest; RFC 6298 section 2.5 wants no less than 60 s. Linux: `TCP_RTO_MAX`.
pub const WIRE_RTO_MAX: Duration = Duration::from_secs(120);
/// Window probe toward G: first interval, in running time (SNOOP-31).
pub const PERSIST_MIN: Duration = Duration::from_millis(200);
/// Window probe toward G: longest interval, in running time (SNOOP-31).
pub const PERSIST_MAX: Duration = Duration::from_secs(60);
/// A window update to R is repeated once after this (SNOOP-34).
pub const WINDOW_UPDATE_REPEAT: Duration = Duration::from_millis(200);
/// G refuses: this many retransmissions of the same byte... (SNOOP-32)
pub const REFUSED_RETRANSMISSIONS: u32 = 15;
/// ...and at least this much running time without progress (SNOOP-32).
pub const REFUSED_RUNNING: Duration = Duration::from_secs(120);
/// The same for a flow that acknowledges late and owes nothing: R, which waits for G itself, gives
/// up after so long (15 retransmissions of Linux, `tcp_retries2`).
pub const REFUSED_LATE: Duration = Duration::from_secs(924);
/// The same for a connection that ends behind the guest: as long as Linux tries, by its 15 retries
/// (`tcp_retries2`; FWD-06).
pub const REFUSED_RUNNING_BEHIND: Duration = Duration::from_secs(924);
/// The connections of a server that was found behind its guest pass for so long (FWD-02).
pub const T_NOT_LOCAL: Duration = Duration::from_secs(600);
/// Data segments of G in a row with a lower TTL than its handshake that show that a connection ends
/// behind it (FWD-01).
pub const LOWER_TTLS: u8 = 2;
/// A guest port and remote that were refused get no offload for this long (SNOOP-32). A firewall
/// rule may have changed by then, and one more refusal an hour costs R one connection.
pub const T_REFUSED: Duration = Duration::from_secs(3600);
/// A guest that has begun a connection that H cannot control is told not to flood for so long
/// (FLOOD-28). H is not responsible for its data in flight then.
pub const T_UNCONTROLLED: Duration = Duration::from_secs(10);
/// Frames that only pass may be so far ahead of a VM's rate limit; the next one is dropped.
pub const LIMIT_DEBT_MAX: Duration = Duration::from_millis(50);
/// Keepalives of R are answered for a silent G this long (T_alive, SNOOP-36).
pub const T_ALIVE: Duration = Duration::from_secs(10);
/// A connection that a guest may have forgotten is probed this often, in running time (LIFE-04b).
pub const DOUBT_PROBE_INTERVAL: Duration = Duration::from_millis(200);
/// It is reset after so many such probes without an answer.
pub const DOUBT_PROBES: u8 = 10;
/// A guest whose driver has begun anew is expected to speak by then, in running time.
pub const T_DOUBT: Duration = Duration::from_secs(600);
/// A VM whose front-end has gone is waited for this long, before its remotes are told (LIFE-16).
pub const T_AWAITED: Duration = Duration::from_secs(2);
/// Flows of a predecessor wait this long for the wire of their VM, if there is no other way to R
/// (LIFE-17).
pub const T_LEFT: Duration = Duration::from_secs(3600);
/// Window probes of R are answered for a paused G this long (T_paused, LIFE-05).
pub const T_PAUSED: Duration = Duration::from_secs(60);
/// R's RST waits this much running time behind the store (T_rst, SNOOP-15).
pub const T_RST: Duration = Duration::from_secs(30);
/// ABORT entries answer challenge ACKs this long (SNOOP-16).
pub const T_ABORT: Duration = Duration::from_secs(60);
/// A closed flow is remembered this long (SNOOP-18).
pub const T_LINGER: Duration = Duration::from_secs(60);
/// A flow that owes nothing gives its reservation and its arena record back after this.
pub const T_PARK: Duration = Duration::from_secs(1);
/// A quiescent flow without traffic is forgotten after this (LIFE-02).
pub const T_IDLE: Duration = Duration::from_secs(3600);
/// No packet of G in this much running time after a delivery: asymmetric path (SNOOP-42).
pub const T_ASYMMETRIC: Duration = Duration::from_secs(5);
/// A fragment that passed to G explains its ACKs this long (SNOOP-24): Linux reassembles for 30 s.
pub const T_FRAGMENT: Duration = Duration::from_secs(60);
/// A handshake that is not completed is forgotten after this: Linux gives up SYN-ACKs after 63 s.
pub const T_HANDSHAKE: Duration = Duration::from_secs(75);
/// Challenge ACKs of one aborted flow are answered at most this often (SEC-07).
pub const ABORT_RST_INTERVAL: Duration = Duration::from_millis(1);
/// A running-time timer is looked at again after at least this much wall time.
pub const TIMER_FLOOR: Duration = Duration::from_millis(2);
/// And after at least this much while the guest shows no life, then after twice as long, and so on:
/// a paused VM must cost nothing, and one that took what it was given be seen to.
pub const TIMER_FLOOR_PAUSED: Duration = Duration::from_millis(100);
/// A smaller MSS option, timestamps included, counts as this one (`tcp_min_snd_mss` of Linux 6.18).
pub const MSS_MIN: u16 = 48;
/// So no segment of full length has less payload, behind timestamps.
pub const PAYLOAD_MIN: u16 = MSS_MIN - 12;
/// Older `ts.recent` does not count for PAWS (SNOOP-04, RFC 7323 section 5.5): a clock of
/// microseconds has gone half way round by then (`TCP_PAWS_WRAP` of Linux 6.7 and later, which has
/// such clocks; before, and with clocks of milliseconds, it was 24 days).
pub const PAWS_IDLE: Duration = Duration::from_secs(2_147);
/// A TSval may be this much older than the newest (`TCP_PAWS_WINDOW` of Linux 6.18).
pub const PAWS_TICKS: i32 = 1;
/// And of a duplicate ACK this much: the shortest timeout, 200 ms, of a clock of 1,200 Hz
/// (`tcp_tsval_replay` of Linux 6.18, which takes the present timeout).
pub const PAWS_REPLAY: i32 = 240;
/// A guest with unseen frames is looked at for signs of life after this, and whenever a timer is
/// due: as often as the timing wheel ticks, and far more often than [`RUNNING_CREDIT_MAX`].
pub const PROGRESS_INTERVAL: Duration = Duration::from_millis(1);
/// Guests with unseen frames that are looked at in one [`PROGRESS_INTERVAL`], besides those that
/// have just kicked: a look at a ring that nobody has touched for long costs some 400 ns, so these
/// 1.3 % of it. One of a thousand is looked at in 32 ms.
pub const LOOKS_PER_INTERVAL: usize = 32;
/// Evidence of running counts at most this much time per piece: a guest that shows life once in
/// 100 ms has not run for 100 ms.
pub const RUNNING_CREDIT_MAX: Duration = Duration::from_millis(10);
/// A learned MAC is forgotten after this (IEEE 802.1D-2004 table 7-5: 300 s).
pub const MAC_AGE: Duration = Duration::from_secs(300);
/// A full MAC table is searched for forgotten ones at most this often.
pub const MAC_SWEEP_INTERVAL: Duration = Duration::from_secs(1);
/// A learned source IP that was silent this long makes room for another.
pub const LEARNED_IP_AGE: Duration = Duration::from_secs(300);

// --- Boost -------------------------------------------------------------------------------------

/// A VM wants its core for so long after the last event that began it (BST-01).
pub const T_WANTING: Duration = Duration::from_millis(50);
/// And for so long after G has acknowledged the last byte that it is owed: G's kernel acknowledges
/// before G's application has read. Longer, and the first flights of a connection over 10 ms would
/// use up a VM's budget.
pub const T_READING: Duration = Duration::from_micros(700);
/// For so long if data last came again within this time, as from a remote in the same data centre:
/// a boost that ended between two pieces of a transfer would leave G to wait for its next turn.
pub const T_READING_ON: Duration = Duration::from_millis(2);
/// A port at which a guest has accepted within this time is likely to accept again.
pub const T_ACCEPTED: Duration = Duration::from_secs(60);
/// Flows of a VM whose bytes are awaited at a time; of more the last ones.
pub const WANTING_FLOWS: usize = 64;
/// Ports of a guest that are known to accept: 1 KiB for a VM that has boost.
pub const ACCEPTING_PORTS: usize = 64;

// --- Accept offload ----------------------------------------------------------------------------

/// A connection that G accepted speaks for its source so long (ACC-01).
pub const T_LEARNED: Duration = Duration::from_secs(60);
/// A source that G refused is not answered for so long, nor its network (ACC-01b).
pub const T_CONDEMNED: Duration = Duration::from_secs(600);
/// Two refusals within this time, in different parts of the network, condemn the port (ACC-01b).
pub const T_REFUSED_APART: Duration = Duration::from_secs(10);
/// Sources and condemned networks of a VM together: 29 KiB.
pub const ACCEPT_KNOWN_MAX: usize = 256;
/// Servers of a VM: 11 KiB.
pub const ACCEPT_SERVERS_MAX: usize = 64;
/// Connections that may wait for G's handshake at a port whatever G has completed in one run, and
/// the most (ACC-10). With 64 KiB each the most are 8 MiB, an eighth of [`VM_BUDGET`].
pub const ACCEPT_WAITING_MIN: u32 = 16;
/// See [`ACCEPT_WAITING_MIN`].
pub const ACCEPT_WAITING_MAX: u32 = 128;
/// SYNs of a VM that H has answered and whose third ACK has not come: 52 KiB. More are for G.
pub const HALF_OPEN_MAX: usize = 256;
/// H repeats its SYN-ACK so many times, first after [`HALF_OPEN_INTERVAL`], then after twice as
/// long each time: 1, 2, 4 and 8 s (ACC-15). After 16 s more the entry goes.
pub const HALF_OPEN_REPEATS: u32 = 4;
/// See [`HALF_OPEN_REPEATS`].
pub const HALF_OPEN_INTERVAL: Duration = Duration::from_secs(1);
/// Entries of one source whose SYN-ACK is repeated (ACC-15): of forged SYNs its owner gets no more.
pub const HALF_OPEN_REPEATED_PER_SOURCE: usize = 3;
/// A cookie is good for the rest of such a period and the next one (ACC-15).
pub const COOKIE_PERIOD: Duration = Duration::from_secs(64);
/// ACKs of nothing are tried as cookies for so long after the last one was given (ACC-15).
pub const COOKIES_TRIED: Duration = Duration::from_secs(128);
/// H's SYN for G is repeated so many times by the wall clock, first after [`OPENING_INTERVAL`],
/// then after twice as long each time: 1, 2, 4, 8 and 16 s (ACC-09), as Linux does
/// (`tcp_syn_retries`).
pub const OPENING_WALL_REPEATS: u32 = 5;
/// See [`OPENING_WALL_REPEATS`].
pub const OPENING_INTERVAL: Duration = Duration::from_secs(1);
/// H gives it up after this: the repetitions, and 32 s for the last one's answer (ACC-09).
pub const T_OPENING: Duration = Duration::from_secs(63);
/// If G has run so many times meanwhile without an answer.
pub const OPENING_RUNS_MIN: u32 = 3;
/// A connection that H has accepted, and in which nothing was heard for so long, is asked whether
/// it is still there (ACC-08), as Linux does (`tcp_keepalive_time`).
pub const T_ASK_TRANSLATED: Duration = Duration::from_secs(7200);
/// It is asked again after this (`tcp_keepalive_intvl`).
pub const ASK_TRANSLATED: Duration = Duration::from_secs(75);
/// So many times; then both sides are reset.
pub const ASKED_MAX: u8 = 9;
/// H answers only for a guest that has shown life within this (ACC-01). One that has not for longer
/// was paused, and what it had accepted before says nothing (ACC-01b).
pub const T_ACCEPT_ALIVE: Duration = Duration::from_secs(2);
/// One part in so many of a VM's entries is for connections that H has accepted (ACC-08).
pub const FLOWS_PER_TRANSLATED: u32 = 2;
const _: () = assert!(ACCEPT_WAITING_MAX as u64 * FLOW_BUFFER_MIN <= VM_BUDGET / 8);

// --- Virtual TOE -------------------------------------------------------------------------------

/// Bytes of one direction of a TOE connection that are under way at most, whatever room a guest
/// shows (VTOE-10). The host keeps none of them: they are in the buffers of its own sockets, which
/// are made twice as large, so that a write never has to wait.
pub const TOE_WINDOW_MAX: u64 = 1024 * 1024;
/// New room is shown to the other end in steps of so much, or at once if the other end may have
/// none left: a quarter of the buffer that Linux gives a vsock socket (256 KiB).
pub const TOE_CREDIT_STEP: u64 = 64 * 1024;
/// The cost of a packet in a guest's buffer besides its payload: Linux charges `SKB_TRUESIZE(0)`
/// for each unread packet (since 2026, `virtio_transport_inc_rx_pkt`), and resets a socket that has
/// no place for it. That is 576 bytes where cache lines have 64, and 768 where they have 256.
pub const TOE_PACKET_COST: u64 = 768;
/// The least payload of a packet to a guest, as long as more is on its way: a receive buffer of
/// Linux has room for 3.7 KiB. Room for the other end is computed with it: of a buffer of 256 KiB
/// it is 197 KiB, and 16 are left for smaller packets. That is more than the 192 KiB after which
/// Linux before 6.7 reports what was read.
pub const TOE_PACKET_FULL: u64 = 3584;
/// Payload of one guest that a host keeps because others' rings have no buffers for it: sixteen
/// windows. Beyond that the guest's ring is not read.
pub const TOE_KEPT_MAX: usize = 16 << 20;
/// And of all together. No guest has more of it than is left for the others; a packet each may be
/// on top of that.
pub const TOE_KEPT_ALL_MAX: usize = 64 << 20;
/// Payload of one guest that waits for more of its stream, less than `TOE_PACKET_FULL` for each
/// socket. Beyond that small packets are given as they are.
pub const TOE_PARTIAL_MAX: usize = 2 << 20;
/// And of all together.
pub const TOE_PARTIAL_ALL_MAX: usize = 32 << 20;
/// The most bytes that the sockets of so many guests take of a host: all kept and held payload, and
/// for each guest a packet and 4 MiB for its sockets, as many past ones, control connections and
/// listeners. The caller adds what its fabrics keep.
#[must_use]
pub const fn toe_bytes_max(guests: usize) -> usize {
    let kept = least(guests * TOE_KEPT_MAX, TOE_KEPT_ALL_MAX);
    kept + least(guests * TOE_PARTIAL_MAX, TOE_PARTIAL_ALL_MAX) + guests * ((4 << 20) + (64 << 10))
}

const fn least(a: usize, b: usize) -> usize {
    if a < b { a } else { b }
}

/// Messages that arrive ahead of others and wait in the fabric, for each connection. Their payload
/// is bounded by its window.
pub const TOE_HELD_MAX: usize = 256;
/// Connections that another host may have asked for meanwhile when a request of it comes late: one
/// that is older is taken for a copy. A bit for each, 8 KiB for a host.
pub const TOE_LATE_REQUESTS: u64 = 65_536;
/// Incarnations of a host whose requests can be distinguished from copies.
pub const TOE_INCARNATIONS_MAX: usize = 4;
/// Ends that are over and may be asked for `Taken` again: 64 bytes each are 1 MiB.
pub const TOE_OVER_MAX: usize = 16_384;
/// Sockets of a guest, including those that it has closed and that still have data to deliver: 4096
/// of half a KiB are 2 MiB. Beyond that its connections use guest TCP.
pub const TOE_SOCKETS_MAX: usize = 4096;
/// So many sockets of a guest that is gone are reset in a turn.
pub const TOE_SOCKETS_PER_STEP: usize = 256;
/// Processes of a guest that ask about sockets, and listeners: each has a control connection.
pub const TOE_CONTROLS_MAX: usize = 1024;
/// Addresses that a guest listens at.
pub const TOE_LISTENERS_MAX: usize = 1024;
/// Sockets of a guest that listen at one of them: more listen without the host.
pub const TOE_LISTENERS_PER_ADDRESS_MAX: usize = 128;
/// Sockets of a guest that have announced a connection and not made it yet.
pub const TOE_WANTED_MAX: usize = 1024;
/// Sockets of a guest without a connection, about whose end the guest may still ask.
pub const TOE_PAST_MAX: usize = 4096;
/// Packets of a guest that belong to no connection and wait for an answer. Beyond that the guest's
/// ring is not read until it takes some. An honest guest has fewer: it answers the packets of its
/// ring, 256 at most, and then waits for its own to be read (Linux, `virtio_transport_rx_work`).
pub const TOE_STRAYS_MAX: usize = 1024;
/// A connection that is not established after this is not going to be: Linux gives up SYNs after
/// 127 s and SYN-ACKs after 63 s.
pub const T_TOE_CONNECT: Duration = Duration::from_secs(63);
/// An end sends a probe this often, whatever else it sends, so that lost messages are repaired.
pub const T_TOE_PROBE: Duration = Duration::from_secs(30);
/// A guest that may have read bytes for which others wait is asked after this time, then half as
/// often each time that it had not read, down to [`T_TOE_ASK_MAX`]. Linux before 6.7 reports what
/// it has read when little room is left by its own count, which counts bytes and not packets.
pub const T_TOE_ASK: Duration = Duration::from_millis(10);
/// See [`T_TOE_ASK`].
pub const T_TOE_ASK_MAX: Duration = Duration::from_secs(1);
/// An end without a message for so long, four probes, has lost the other one (VTOE-06).
pub const T_TOE_SILENCE: Duration = Duration::from_secs(120);
/// Bytes that must have been sent and have not come after this are lost: fabrics reorder within
/// milliseconds, and repeat by themselves.
pub const T_TOE_HOLE: Duration = Duration::from_secs(10);
/// A closed socket waits so long for the end of the other stream (`tcp_fin_timeout` of Linux).
pub const T_TOE_ORPHAN: Duration = Duration::from_secs(60);
/// And so long for the other guest to take its bytes, 1 MiB at most: Linux gives up on a peer that
/// takes nothing after 924 s (`tcp_retries2`). Without this limit a peer that never reads could
/// fill the other guest's table of sockets.
pub const T_TOE_DRAIN: Duration = Duration::from_secs(924);

/// Worst-case pages of a window of `bytes` bytes at any alignment: both ends may be partial.
///
/// Bytes 16383..16385 are two bytes in two pages, so n bytes need at most 1 + ceil((n-1)/PAGE).
#[must_use]
pub const fn pages_for(bytes: u64) -> u64 {
    if bytes == 0 { 0 } else { (bytes - 1).div_ceil(PAGE as u64) + 1 }
}

const _: () = assert!(PAGE.is_power_of_two());
const _: () = assert!(FLOW_BUFFER_MIN <= FLOW_BUFFER_INITIAL);
const _: () = assert!(FLOW_BUFFER_INITIAL <= FLOW_BUFFER_DOUBLED_MAX);
const _: () = assert!(FLOW_BUFFER_DOUBLED_MAX <= FLOW_BUFFER_MAX);
const _: () = assert!(FLOW_BUFFER_MAX <= VM_BUDGET);
// COM-01: windows stay far below 2^30, so serial comparison never sees an ambiguous distance.
const _: () = assert!(FLOW_BUFFER_MAX < 1 << 30);
const _: () = assert!(pages_for(FLOW_BUFFER_MAX) == 2049);
const _: () = assert!(pages_for(FLOW_BUFFER_MIN) == 5);
const _: () = assert!(FLOW_BYTES_IDLE <= 512);
const _: () = assert!(TOE_CREDIT_STEP * 4 <= TOE_WINDOW_MAX);
const _: () = assert!(T_TOE_PROBE.as_nanos() * 4 <= T_TOE_SILENCE.as_nanos());
