//! Why a frame was dropped: one closed list for the counter, the metric label and the trace text.

macro_rules! drop_reasons {
    ($($(#[doc = $doc:literal])+ $variant:ident = $label:literal,)+) => {
        /// Why a frame went no further. Each reason is a counter per port.
        #[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
        #[repr(u8)]
        pub enum DropReason { $($(#[doc = $doc])+ $variant,)+ }

        impl DropReason {
            /// Every reason, in declaration order (`self as usize` indexes it).
            pub const ALL: &[Self] = &[$(Self::$variant,)+];

            /// The stable snake_case name used as metric label and in traces.
            #[must_use]
            pub const fn label(self) -> &'static str {
                match self { $(Self::$variant => $label,)+ }
            }

            /// One sentence for operators: what happened.
            #[must_use]
            pub const fn doc(self) -> &'static str {
                match self { $(Self::$variant => concat!($($doc),+),)+ }
            }
        }
    };
}

drop_reasons! {
    /// The frame is shorter than its own headers say, or than an Ethernet header.
    Truncated = "truncated",
    /// A header field contradicts another (IHL, data offset, total length).
    MalformedHeader = "malformed_header",
    /// The virtio-net header asks for something the frame cannot give (offsets, GSO type or size),
    /// or for a super-segment of more than 512 segments, or one to a group.
    MalformedVirtioHeader = "malformed_virtio_header",
    /// The IPv4 header or TCP checksum is wrong and no trusted party vouched for it.
    BadChecksum = "bad_checksum",
    /// The source MAC is not the one this port may use.
    SpoofedMac = "spoofed_mac",
    /// A VM without a configured MAC uses one that was heard elsewhere within 300 s: behind an
    /// uplink, or from a VM that has just gone.
    MacElsewhere = "mac_elsewhere",
    /// The source IP is not on this port's list, is on another's, or is none a host can have; or
    /// the port has a list, and the frame speaks for others or says what cannot be checked.
    SpoofedIp = "spoofed_ip",
    /// The destination is a group address that bridges do not forward (802.1D).
    ReservedGroup = "reserved_group",
    /// The frame would leave by the port it came from.
    Hairpin = "hairpin",
    /// The frame is of a VLAN that its VM is not in, or has a tag although its VM is to know of
    /// none.
    Vlan = "vlan",
    /// From one VM to another, and one of them is isolated.
    Isolated = "isolated",
    /// The VM sends, or is sent, more than its rate limit.
    RateLimit = "rate_limit",
    /// The VM sends more frames to groups than others should get: 1,000 at once, 10,000 a second.
    Storm = "storm",
    /// The destination port has no driver listening (link down, driver reset).
    PortDown = "port_down",
    /// The destination queue and its backlog are full.
    QueueFull = "queue_full",
    /// The frame does not fit the destination, or the `mtu` of the VM that it is for, and may not
    /// be segmented (no GSO metadata), or is longer than 9,234 bytes and for a group.
    TooBig = "too_big",
    /// A flow in ABORT answers nothing but challenge ACKs.
    FlowAborted = "flow_aborted",
    /// TCP segment with a flag combination no conforming sender makes (COM-06).
    BadFlags = "bad_flags",
    /// PAWS: the timestamp is missing or older than what was seen (RFC 7323 section 5).
    Paws = "paws",
    /// The sequence range lies outside the window we advertised (SNOOP-02).
    OutOfWindow = "out_of_window",
    /// A duplicate of bytes already accepted (SNOOP-11).
    Duplicate = "duplicate",
    /// The acknowledgement number is outside what was sent (SNOOP-03, INV-12).
    BadAck = "bad_ack",
    /// An RST whose sequence number is not exact (SNOOP-15).
    BadRst = "bad_rst",
    /// A SYN on a live flow, answered with a challenge ACK (SNOOP-17).
    SynOnLiveFlow = "syn_on_live_flow",
    /// Accepted in window but no store page was free; not acknowledged (LIFE-03).
    NoStore = "no_store",
    /// Out-of-order data beyond the flow's limits; not acknowledged (SNOOP-10).
    OutOfOrderLimit = "out_of_order_limit",
    /// Urgent data or an unknown option behind bytes that G has yet to take; R will send it again.
    Draining = "draining",
    /// The datagram is no VXLAN: too short for its header, or it names no network.
    NotVxlan = "not_vxlan",
    /// The datagram is of another VXLAN network than the overlay.
    UnknownVni = "unknown_vni",
    /// The datagram comes from a host that is none of the overlay's peers.
    UnknownPeer = "unknown_peer",
    /// The tunnel's header says that there was congestion, and the sender of what is inside does
    /// not understand marks (RFC 6040 section 4.2).
    EcnMismatch = "ecn_mismatch",
}
