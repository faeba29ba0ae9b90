//! A flow that goes on in another engine behaves, frame by frame, as the one that stayed. At a
//! random step a second engine imports what the first one exports; from then on both get the same
//! frames.

use crate::drops::DropReason;
use crate::engine::{ExportError, ImportError};
use crate::flow::table::FlowId;
use crate::limits::PAYLOAD_MIN;
use crate::port::{GuestConfig, PortConfig};
use crate::store::arena::Arena;
use crate::tcp::flow::{Flow, Why};
use crate::tcp::options::Offers;
use crate::tcp::predicted::tests::{GUEST, PAGES, Shape, Side, Step, UPLINK, shape, step};
use crate::time::{Duration, Instant};
use crate::wire::saved::BadImage;
use proptest::prelude::*;
use zerocopy::IntoBytes;

fn memory() -> Vec<u64> {
    vec![0; Arena::layout_len(4, PAGES) / 8]
}

/// All of a flow but where its bytes are, and which record it has.
fn parts((_, key, flow): (FlowId, &crate::flow::key::FlowKey, &Flow)) -> String {
    let Flow {
        standing,
        options,
        receiver,
        store: _,
        sender,
        outbound,
        losses,
        timestamps,
        template,
        timers,
        owing,
    } = flow;
    let text = format!(
        "{key} {standing:?} {options:?} {receiver:?} {sender:?} {outbound:?} {losses:?} \
         {timestamps:?} {template:?} {timers:?} {owing}"
    );
    // Without the number that is in each of these places.
    let pieces = text.split_inclusive(['(', ')']).scan(false, |is_place, piece| {
        let skips = std::mem::replace(
            is_place,
            ["PageId(", "RecordId("].iter().any(|it| piece.ends_with(it)),
        );
        Some(if skips { ")\n" } else { piece })
    });
    pieces.collect()
}

/// All that is to be seen of an engine whose clock is that of the other.
fn state(side: &Side<'_>) -> String {
    let flows: Vec<String> = side.engine.flows().map(parts).collect();
    let vm = side.engine.vm(GUEST).expect("a guest");
    format!(
        "{} {:#?} {:?} {} {} {} {:?}",
        flows.join("\n"),
        vm.clock,
        vm.absence,
        vm.reserved_pages,
        vm.owing_flows,
        vm.ready.len(),
        vm.refused,
    )
}

/// A multiple of all units of the engine's clocks: 8 s, and 65,536 ns.
const UNITS: Duration = Duration::from_secs(128);

fn shifts() -> impl Strategy<Value = Duration> {
    prop_oneof![Just(0_u64), Just(1), 2..1_000_u64].prop_map(|n| UNITS.saturating_mul(n))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]
    #[test]
    fn life_09_a_flow_that_moves_behaves_frame_by_frame_as_the_one_that_stays(
        shape in shape(),
        before in prop::collection::vec(step(), 0..80),
        after in prop::collection::vec(step(), 1..80),
        shift in shifts(),
        predicts in any::<bool>(),
    ) {
        let mut memories = [memory(), memory()];
        let [here, there] = memories.each_mut().map(|m| m.as_mut_bytes());
        let mut stays = Side::new(here, shape, predicts);
        before.into_iter().for_each(|step| stays.step(step));
        let mut moves = stays.moved(there, shift, predicts);
        for step in after {
            prop_assert_eq!(&stays.said, &moves.said, "before {:?}", step);
            if shift == Duration::ZERO {
                prop_assert_eq!(state(&stays), state(&moves), "before {:?}", step);
            }
            stays.step(step);
            moves.step(step);
        }
        prop_assert_eq!(&stays.said, &moves.said);
    }

    /// Any bytes in the place of others, behind a right checksum.
    #[test]
    fn whatever_an_image_says_it_is_refused_or_goes_on(
        shape in shape(),
        before in prop::collection::vec(step(), 0..60),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        after in prop::collection::vec(step(), 1..40),
    ) {
        let mut memories = [memory(), memory()];
        let [here, there] = memories.each_mut().map(|m| m.as_mut_bytes());
        let mut stays = Side::new(here, shape, true);
        before.into_iter().for_each(|step| stays.step(step));
        let mut other = stays.moved_as(there, |image| {
            let len = image.len() - 24;
            changes.iter().for_each(|(at, byte)| image[24 + at.index(len)] = *byte);
        });
        after.into_iter().for_each(|step| other.step(step));
    }
}

fn plain() -> Shape {
    Shape {
        v6: false,
        timestamps: true,
        ecn: false,
        tagged: false,
        neighbours: false,
        floods: false,
        budget_pages: PAGES,
    }
}

/// A flow with bytes in its store, and its image.
fn image_of(memory: &mut [u64]) -> (Side<'_>, Vec<u8>) {
    let mut side = Side::new(memory.as_mut_bytes(), plain(), true);
    side.sends_bytes(3000);
    side.step(Step::BatchEnd);
    let image = side.image();
    (side, image)
}

#[test]
fn an_image_that_was_changed_or_cut_or_is_of_another_version_is_an_error() {
    let (mut here, mut there) = (memory(), memory());
    let (_, image) = image_of(&mut here);
    let mut other = Side::other(there.as_mut_bytes(), plain());
    let mut import = |bytes: &[u8]| other.engine.import(other.now, GUEST, bytes);
    for len in 0..image.len() {
        let bad = if len < 24 { BadImage::NotAnImage } else { BadImage::Damaged };
        assert_eq!(import(&image[..len]), Err(ImportError::Bad(bad)), "{len} bytes");
    }
    for at in 0..image.len() {
        let mut changed = image.clone();
        changed[at] ^= 0x10;
        let bad = match at {
            0..8 => BadImage::NotAnImage,
            8..12 => BadImage::OtherVersion(u32::from_le_bytes(changed[8..12].try_into().unwrap())),
            _ => BadImage::Damaged,
        };
        assert_eq!(import(&changed), Err(ImportError::Bad(bad)), "byte {at}");
    }
    assert_eq!(import(&[&image[..], &[0]].concat()), Err(ImportError::Bad(BadImage::Damaged)));
    assert_eq!(import(&image).map(|it| (it.flows, it.reset)), Ok((1, 0)));
    assert_eq!(import(&image), Err(ImportError::InUse));
}

#[test]
fn what_finds_no_room_changes_nothing() {
    let (mut here, mut there) = (memory(), memory());
    let (side, image) = image_of(&mut here);
    let held = side.engine.vm(GUEST).unwrap().reserved_pages;
    let mut other = Side::other(there.as_mut_bytes(), Shape { budget_pages: 4, ..plain() });
    assert!(held > 4);
    assert_eq!(other.engine.import(other.now, GUEST, &image), Err(ImportError::NoRoom));
    assert_eq!(other.engine.import(other.now, UPLINK, &image), Err(ImportError::NoGuest));
    assert_eq!(other.engine.export(other.now, UPLINK), Err(ExportError::NoGuest));
    assert_eq!((other.engine.flows_len(), other.engine.vm(GUEST).unwrap().reserved_pages), (0, 0));
}

#[test]
fn an_image_speaks_for_its_own_guest_alone() {
    let (mut here, mut there) = (memory(), memory());
    let (_, image) = image_of(&mut here);
    let mut other = Side::other(there.as_mut_bytes(), plain());
    // The source MAC of the flow's frames.
    let l2 = [2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0];
    let at = place(&image, &l2);
    let mut forged = image.clone();
    forged[at + 11] = 7;
    Side::seal(&mut forged);
    let refused = other.engine.import(other.now, GUEST, &forged);
    assert!(matches!(refused, Err(ImportError::Spoofed(_))), "{refused:?}");
    assert_eq!(other.engine.flows_len(), 0);
}

/// Where bytes are in an image.
fn place(image: &[u8], bytes: &[u8]) -> usize {
    image.windows(bytes.len()).position(|window| window == bytes).expect("they are there")
}

/// The guest's MAC is not configured.
fn has_no_mac(side: &mut Side<'_>, ips: Option<Vec<core::net::IpAddr>>) {
    let config = side.engine.port_config(GUEST).and_then(PortConfig::as_guest).cloned();
    let config = GuestConfig { mac: None, ips, ..config.expect("a guest") };
    side.engine.set_guest(side.now, GUEST, config).expect("there is room");
}

#[test]
fn an_image_that_is_refused_teaches_nothing() {
    let (mut here, mut there) = (memory(), memory());
    let (_, image) = image_of(&mut here);
    let mut other = Side::other(there.as_mut_bytes(), plain());
    let others: core::net::IpAddr = [10, 0, 0, 77].into();
    has_no_mac(&mut other, Some(vec![others]));
    let refused = other.engine.import(other.now, GUEST, &image);
    assert_eq!(refused, Err(ImportError::Spoofed(DropReason::SpoofedIp)));
    assert_eq!(other.engine.known_mac(GUEST), None);
    has_no_mac(&mut other, None);
    assert_eq!(other.engine.import(other.now, GUEST, &image).map(|it| it.flows), Ok(1));
    assert_eq!(other.engine.known_mac(GUEST), Some([2, 0, 0, 0, 0, 2]));
}

#[test]
fn flows_arrive_before_their_guest_is_announced_and_take_its_mac_from_nobody() {
    let (mut here, mut there) = (memory(), memory());
    let (_, image) = image_of(&mut here);
    let mut other = Side::other(there.as_mut_bytes(), plain());
    has_no_mac(&mut other, None);
    other.is_heard_at(UPLINK, 2); // the guest's last frame on the other host
    assert_eq!(other.engine.import(other.now, GUEST, &image).map(|it| it.flows), Ok(1));
    assert_eq!(other.engine.known_mac(GUEST), None);
    assert!(other.engine.handle_announcement(other.now, GUEST, [2, 0, 0, 0, 0, 2]));
    assert_eq!(other.engine.known_mac(GUEST), Some([2, 0, 0, 0, 0, 2]));
}

/// A frame of the largest size would be cut into so many segments in one turn.
#[test]
fn segments_of_an_image_are_no_shorter_than_those_of_handshakes() {
    let (mut here, mut there) = (memory(), memory());
    let (_, image) = image_of(&mut here);
    let mut other = Side::other(there.as_mut_bytes(), plain());
    // 1,448 bytes for G, then for R.
    let at = place(&image, &[0xa8, 5, 0xa8, 5]);
    for at in [at, at + 2] {
        let mut forged = image.clone();
        forged[at..at + 2].copy_from_slice(&(PAYLOAD_MIN - 1).to_le_bytes());
        Side::seal(&mut forged);
        let refused = other.engine.import(other.now, GUEST, &forged);
        assert_eq!(refused, Err(ImportError::Bad(BadImage::Impossible("Flow"))));
    }
}

/// Another layout is another version: raise it, then write down the new hash.
#[test]
fn an_image_of_this_version_is_byte_for_byte_this_one() {
    let mut here = memory();
    let mut side = Side::new(here.as_mut_bytes(), Shape { floods: true, ..plain() }, true);
    side.hands_over(3000);
    side.step(Step::Depart(8));
    side.skips_bytes(1000);
    side.sends_bytes(500);
    side.step(Step::Deliver(1, true));
    side.step(Step::Millis(400));
    side.engine.hand_back(side.now, GUEST);
    let image = side.image();
    let (version, hash) = (&image[8..12], &image[16..24]);
    assert_eq!((version, hash), (&[2, 0, 0, 0][..], &[241, 75, 66, 251, 163, 235, 36, 221][..]));
}

/// Its RSTs go on from there, and an acknowledgement never goes back (INV-07).
#[test]
fn a_flow_that_was_reset_has_acknowledged_no_more_than_it_had() {
    let mut flow = Flow::new(Instant::from_secs(1), Offers::default(), false);
    flow.standing.take_on();
    flow.standing.abort(Why::Reset, false);
    assert!(flow.is_possible(false));
    flow.receiver.acks.on_sent(flow.receiver.next() + 1);
    assert!(!flow.is_possible(false));
}

#[test]
fn flows_for_which_the_host_sends_are_handed_back_first() {
    let mut here = memory();
    let mut side = Side::new(here.as_mut_bytes(), Shape { floods: true, ..plain() }, true);
    side.hands_over(1000);
    assert_eq!(side.engine.export(side.now, GUEST), Err(ExportError::SentFor));
    side.engine.hand_back(side.now, GUEST);
    assert!(side.engine.export(side.now, GUEST).is_ok());
}
