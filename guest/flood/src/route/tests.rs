use super::*;

/// An attribute.
fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    emit(&[(Kind(kind), value.to_vec())])
}

fn route(header: [u8; RTMSG], attributes: &[Vec<u8>]) -> Route {
    Route::parse(&[&header[..], &attributes.concat()].concat()).unwrap()
}

/// The header of a unicast IPv4 route of the main table, made by `protocol`.
fn v4(prefix: u8, protocol: u8) -> [u8; RTMSG] {
    [2, prefix, 0, 0, 254, protocol, 0, RTN_UNICAST, 0, 0, 0, 0]
}

/// `default via 10.0.0.1 dev NIC metric METRIC`.
pub(crate) fn default_by(nic: u32, metric: u32) -> Route {
    route(
        v4(0, 3),
        &[
            attribute(RTA_TABLE, &254_u32.to_ne_bytes()),
            attribute(RTA_PRIORITY, &metric.to_ne_bytes()),
            attribute(RTA_GATEWAY, &[10, 0, 0, 1]),
            attribute(RTA_OIF, &nic.to_ne_bytes()),
        ],
    )
}

/// The same over several interfaces, the first of them with `flags`.
pub(crate) fn default_over(nics: &[u32], flags: u8) -> Route {
    let hop = |nic: &u32, flags: u8| {
        let nic = nic.to_ne_bytes();
        let mut hop = vec![16, 0, flags, 0, nic[0], nic[1], nic[2], nic[3]];
        hop.extend(attribute(RTA_GATEWAY, &[10, 0, 0, nic[0]]));
        hop
    };
    let mut all = hop(&nics[0], flags);
    all.extend(nics[1..].iter().flat_map(|nic| hop(nic, 0)));
    route(v4(0, 3), &[attribute(RTA_MULTIPATH, &all)])
}

#[test]
fn a_route_is_sent_back_byte_for_byte() {
    let unknown = attribute(0x8000 | 77, &[1, 2, 3, 4, 5]);
    let attributes = [attribute(RTA_OIF, &7_u32.to_ne_bytes()), unknown].concat();
    let body = [&v4(24, 3)[..], &attributes].concat();
    assert_eq!(Route::parse(&body).unwrap().body(), body);
}

#[test]
fn the_initial_window_comes_and_goes_and_other_metrics_stay() {
    let metrics = [(Kind(2), 1400_u32), (Kind(0x8000 | 10), 7)];
    let metrics = metrics.map(|(kind, value)| (kind, value.to_ne_bytes().to_vec()));
    let plain = route(v4(0, 3), &[attribute(RTA_METRICS, &emit(&metrics))]);
    assert_eq!(plain.initcwnd(), None);
    let floods = plain.with_initcwnd(Some(1000)).unwrap();
    assert_eq!(floods.initcwnd(), Some(1000));
    assert_eq!(floods.with_initcwnd(Some(20)).unwrap().initcwnd(), Some(20));
    assert_eq!(floods.with_initcwnd(None).unwrap(), plain);
    // Nothing is left of a route that had no metrics.
    let bare = default_by(7, 100);
    assert_eq!(bare.with_initcwnd(Some(9)).unwrap().with_initcwnd(None).unwrap(), bare);
}

#[test]
fn routes_are_named_as_ip_route_names_them() {
    assert_eq!(default_by(7, 100).name(), "default metric 100");
    let dst = attribute(RTA_DST, &[10, 1, 0, 0]);
    let table = attribute(RTA_TABLE, &1000_u32.to_ne_bytes());
    let mut header = v4(16, 3);
    header[3] = 8;
    assert_eq!(route(header, &[dst, table]).name(), "10.1.0.0/16 tos 0x08 table 1000");
    let v6 = [10, 0, 64, 0, 254, 3, 0, RTN_UNICAST, 0, 0, 0, 0];
    let from = attribute(RTA_SRC, &[0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(route(v6, &[from]).name(), "inet6 default from fd00::/64");
}

#[test]
fn only_unicast_routes_to_other_machines_are_for_us() {
    assert!(default_by(7, 100).is_for_us());
    let local = attribute(RTA_TABLE, &255_u32.to_ne_bytes());
    assert!(!route(v4(32, 2), &[local]).is_for_us());
    let mut blackhole = v4(0, 3);
    blackhole[7] = 6;
    assert!(!route(blackhole, &[]).is_for_us());
    let v6 = [AF_INET6, 64, 0, 0, 254, 2, 0, RTN_UNICAST, 0, 0, 0, 0];
    let to =
        |first: u8| attribute(RTA_DST, &[first, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert!(!route(v6, &[to(0xfe)]).is_for_us() && route(v6, &[to(0xfd)]).is_for_us());
    let mut cached = v4(0, 3);
    cached[8..].copy_from_slice(&RTM_F_CLONED.to_ne_bytes());
    assert!(!route(cached, &[]).is_for_us());
}

#[test]
fn a_route_of_a_router_advertisement_or_with_an_end_is_the_kernels_own() {
    assert!(!default_by(7, 100).is_kernels_own());
    assert!(route(v4(0, RTPROT_RA), &[]).is_kernels_own());
    let info = |expires: u32| {
        let mut info = [0; 32];
        info[8..12].copy_from_slice(&expires.to_ne_bytes());
        route(v4(0, 3), &[attribute(RTA_CACHEINFO, &info)])
    };
    assert!(info(1200).is_kernels_own() && !info(0).is_kernels_own());
}

#[test]
fn what_the_kernel_says_of_a_route_is_not_sent_back() {
    // RTNH_F_LINKDOWN and RTNH_F_DEAD on the route and on a hop; RTNH_F_ONLINK is ours.
    let mut header = v4(0, 3);
    header[8] = 0x10 | 0x01 | 0x04;
    let down = Route { header, ..default_over(&[7, 8], 0x10 | 0x01 | 0x04) };
    let sent = Route::parse(&down.body()).unwrap();
    assert_eq!(sent.header[8], 0x04);
    assert_eq!(sent, Route { header: sent.header, ..default_over(&[7, 8], 0x04) });
    let info = route(v4(0, 3), &[attribute(RTA_CACHEINFO, &[0; 32])]);
    assert_eq!(info.body(), v4(0, 3));
}

#[test]
fn a_next_hop_with_a_number_is_sent_by_its_number_alone() {
    let mut by_id = default_by(7, 100);
    let plain = by_id.attributes.len();
    by_id.attributes.push((Kind(RTA_NH_ID), vec![5, 0, 0, 0]));
    let sent = Route::parse(&by_id.body()).unwrap();
    assert_eq!(sent.attributes.len(), plain - 2 + 1); // gateway and interface are gone
    assert_eq!((sent.outputs(), by_id.outputs()), (vec![], vec![7]));
}

#[test]
fn all_interfaces_of_a_multipath_route_are_its_outputs() {
    assert_eq!(default_by(7, 100).outputs(), [7]);
    assert_eq!(default_over(&[7, 8], 0).outputs(), [7, 8]);
}

#[test]
fn messages_that_are_cut_off_are_errors() {
    assert!(Route::parse(&[0; RTMSG - 1]).is_err());
    let body = default_by(7, 100).body();
    assert!(Route::parse(&body[..body.len() - 1]).is_err());
    assert!(Route::parse(&[&v4(0, 3)[..], &[3, 0, 1, 0]].concat()).is_err());
}
