//! Connections, as the daemon tells of them.

use serde::{Deserialize, Serialize};

/// Some connections, in order of their numbers.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct FlowPage {
    /// At most 100, and perhaps none though there are more.
    pub flows: Vec<FlowInfo>,
    /// Where to go on, if there are more.
    pub next: Option<u64>,
}

/// A connection whose guest has acknowledged nothing for a while.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct StandingFlow {
    /// Its number ([`FlowInfo::id`]).
    pub id: u64,
    /// Address and port of the guest.
    pub guest: String,
    /// Address and port of the remote.
    pub remote: String,
    /// Bytes acknowledged to the remote that the guest has not acknowledged.
    pub held_bytes: u64,
    /// For how long the guest has acknowledged none of them, of the time in which it ran.
    pub seconds: u64,
    /// The guest has no room for them: its application does not read.
    pub is_unread: bool,
}

/// One tracked connection. Byte counts include a FIN as one.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct FlowInfo {
    /// Its number; used again once it is gone.
    pub id: u64,
    /// The VM's name.
    pub vm: String,
    /// Address and port of the guest.
    pub guest: String,
    /// Address and port of the remote.
    pub remote: String,
    /// VLAN tags, outer in the high half; 0 is none.
    pub vlan: u64,
    /// `handshake`, `opening`, `on`, `drain`, `pass` or `abort`; or over, and soon forgotten:
    /// `closed` by both sides (`translated`, if the host had accepted it), or `reset`.
    pub state: String,
    /// Why it is not, or no longer, `on`.
    pub why: String,
    /// The guest opened it.
    pub guest_is_client: bool,
    /// Bytes acknowledged to the remote that the guest has not acknowledged.
    pub held_bytes: u64,
    /// Most bytes that may be held and promised for it.
    pub buffer_bytes: u64,
    /// Remote to guest: of the bytes held, those not yet handed to the guest.
    pub undelivered_bytes: u64,
    /// Remote to guest: bytes handed to the guest and not yet acknowledged by it.
    pub in_flight_to_guest: u64,
    /// Remote to guest: bytes the guest's own window takes beyond those it has acknowledged.
    pub window_of_guest: u64,
    /// Remote to guest: bytes the remote may still send, by the window it was last shown.
    pub window_to_remote: u64,
    /// Remote to guest: bytes received and not yet acknowledged to the remote.
    pub unacked_to_remote: u64,
    /// Guest to remote: bytes sent on and not yet acknowledged by the remote.
    pub in_flight_to_remote: u64,
    /// Timestamps are in use.
    pub timestamps: bool,
    /// Selective acknowledgement is in use.
    pub sack: bool,
    /// Explicit congestion notification is in use.
    pub ecn: bool,
    /// Largest segment payload the guest takes.
    pub mss_to_guest: u16,
    /// Payload bytes ever acknowledged ahead of the guest.
    pub early_acked_bytes: u64,
    /// Frames handed to the guest again.
    pub local_retransmissions: u64,
    /// Pure ACKs of the guest that went no further.
    pub acks_absorbed: u64,
    /// Whole seconds since a frame of it was seen.
    pub idle_s: u32,
    /// How the host sends for the guest, if it does (congestion offload).
    pub sends: Option<SendInfo>,
}

/// How the host sends the data that the guest has handed over.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct SendInfo {
    /// Handed over, and not acknowledged by the remote.
    pub kept_bytes: u64,
    /// Of these, not sent yet.
    pub unsent_bytes: u64,
    /// Under way to the remote, as far as is known.
    pub in_flight_bytes: u64,
    /// Bytes that may be under way: the congestion window.
    pub cwnd_bytes: u64,
    /// Slow start ends at this window; `None` before the first loss.
    pub ssthresh_bytes: Option<u64>,
    /// The smoothed round trip between host and remote; `None` before the first.
    pub srtt_us: Option<u64>,
    /// Payload bytes of a segment.
    pub mss: u64,
    /// Frames that were sent again.
    pub retransmissions: u64,
    /// Timeouts since the remote's last segment.
    pub timeouts_in_a_row: u8,
}
