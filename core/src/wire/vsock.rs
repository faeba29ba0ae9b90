//! The header of a virtio-vsock packet (virtio 1.2 section 5.10.6): 44 bytes, little-endian.

/// Bytes of the header.
pub const LEN: usize = 44;
/// The CID of the host, for every guest (virtio 1.2 section 5.10.4).
pub const HOST_CID: u64 = 2;
/// VIRTIO_VSOCK_TYPE_STREAM: the only type of sockets that there are here.
pub const STREAM: u16 = 1;
/// VIRTIO_VSOCK_SHUTDOWN_F_RECEIVE: the sender of this receives no more.
pub const SHUTDOWN_RECEIVE: u32 = 1;
/// VIRTIO_VSOCK_SHUTDOWN_F_SEND: the sender of this sends no more.
pub const SHUTDOWN_SEND: u32 = 2;

/// The purpose of a packet.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Op {
    /// Connect.
    Request,
    /// The answer to it: connected.
    Response,
    /// There is no connection, or none any more.
    Reset,
    /// No more in the directions that the flags name.
    Shutdown,
    /// Payload.
    Data,
    /// Only the sender's room, which every header contains.
    CreditUpdate,
    /// Asks for the receiver's room.
    CreditRequest,
}

impl Op {
    /// Every one, by its number minus 1.
    pub const ALL: [Self; 7] = [
        Self::Request,
        Self::Response,
        Self::Reset,
        Self::Shutdown,
        Self::Data,
        Self::CreditUpdate,
        Self::CreditRequest,
    ];

    const fn number(self) -> u16 {
        match self {
            Self::Request => 1,
            Self::Response => 2,
            Self::Reset => 3,
            Self::Shutdown => 4,
            Self::Data => 5,
            Self::CreditUpdate => 6,
            Self::CreditRequest => 7,
        }
    }
}

/// A header. Others check which combinations of values make sense.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Header {
    /// The sender.
    pub src_cid: u64,
    /// The receiver.
    pub dst_cid: u64,
    /// The sender's port.
    pub src_port: u32,
    /// The receiver's.
    pub dst_port: u32,
    /// Bytes of payload behind the header.
    pub len: u32,
    /// [`STREAM`].
    pub kind: u16,
    /// `None`: a number that stands for nothing.
    pub op: Option<Op>,
    /// Of [`Op::Shutdown`] the directions.
    pub flags: u32,
    /// Bytes of the sender's buffer.
    pub buf_alloc: u32,
    /// Bytes that have left it, modulo 2^32.
    pub fwd_cnt: u32,
}

impl Header {
    /// Reads a header.
    #[must_use]
    pub fn parse(b: &[u8; LEN]) -> Self {
        let word = |at: usize| u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]]);
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        let short = |at: usize| u16::from_le_bytes([b[at], b[at + 1]]);
        let op = short(30);
        Self {
            src_cid: long(0),
            dst_cid: long(8),
            src_port: word(16),
            dst_port: word(20),
            len: word(24),
            kind: short(28),
            op: Op::ALL.into_iter().find(|known| known.number() == op),
            flags: word(32),
            buf_alloc: word(36),
            fwd_cnt: word(40),
        }
    }

    /// Its bytes.
    #[must_use]
    pub fn emit(&self) -> [u8; LEN] {
        let mut b = [0; LEN];
        b[..8].copy_from_slice(&self.src_cid.to_le_bytes());
        b[8..16].copy_from_slice(&self.dst_cid.to_le_bytes());
        for (at, word) in [(16, self.src_port), (20, self.dst_port), (24, self.len)] {
            b[at..at + 4].copy_from_slice(&word.to_le_bytes());
        }
        b[28..30].copy_from_slice(&self.kind.to_le_bytes());
        b[30..32].copy_from_slice(&self.op.map_or(0, Op::number).to_le_bytes());
        for (at, word) in [(32, self.flags), (36, self.buf_alloc), (40, self.fwd_cnt)] {
            b[at..at + 4].copy_from_slice(&word.to_le_bytes());
        }
        b
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_header_is_that_of_virtio() {
        let header = Header {
            src_cid: 3,
            dst_cid: HOST_CID,
            src_port: 0x0102_0304,
            dst_port: 5,
            len: 6,
            kind: STREAM,
            op: Some(Op::Data),
            flags: 7,
            buf_alloc: 0x4_0000,
            fwd_cnt: 8,
        };
        let bytes = header.emit();
        assert_eq!(bytes[..8], [3, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(bytes[16..20], [4, 3, 2, 1]);
        assert_eq!(bytes[24..32], [6, 0, 0, 0, 1, 0, 5, 0]);
        assert_eq!(bytes[32..], [7, 0, 0, 0, 0, 0, 4, 0, 8, 0, 0, 0]);
        assert_eq!(Header::parse(&bytes), header);
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_header_and_read_back_but_for_an_unknown_operation(
            a in any::<[u8; 22]>(), b in any::<[u8; 22]>(), op in 0..10_u8,
        ) {
            let mut bytes = [a, b].concat();
            bytes[30..32].copy_from_slice(&[op, 0]);
            let bytes: [u8; LEN] = bytes.try_into().expect("44");
            let header = Header::parse(&bytes);
            prop_assert_eq!(header.op.is_some(), (1..=7).contains(&op));
            if header.op.is_some() {
                prop_assert_eq!(header.emit(), bytes);
            }
        }
    }
}
