//! Warnings about configurations that are possible, and hardly what was meant.

use super::{Config, VmConfig};

/// VMs that reach each other, one of which takes no packets as long as those that the other sends.
/// A switch cannot report that: it drops them (`too_big`), and the sender is not told.
pub(crate) fn uneven_mtus(config: &Config) -> impl Iterator<Item = String> {
    let largest = config.vms.iter().map(|vm| vm.mtu).max();
    let smaller = config.vms.iter().filter(move |vm| Some(vm.mtu) < largest);
    smaller.filter_map(|vm| {
        let meets = |other: &&VmConfig| {
            let apart = other.isolated || vm.isolated || other.network != vm.network;
            other.mtu > vm.mtu && !apart && share_a_vlan(other, vm)
        };
        let larger = config.vms.iter().find(meets)?;
        let VmConfig { name, mtu, .. } = vm;
        Some(format!(
            "vm.{name}: has an MTU of {mtu}, and {} of {}: large packets between them vanish, \
             except TCP's\n    fix: give both the same mtu",
            larger.name, larger.mtu
        ))
    })
}

/// A VM with neither `vlan` nor `trunk` is in all VLANs.
fn share_a_vlan(a: &VmConfig, b: &VmConfig) -> bool {
    fn vlans(vm: &VmConfig) -> Option<&[u16]> {
        vm.trunk.as_deref().or_else(|| vm.vlan.as_ref().map(std::slice::from_ref))
    }
    match (vlans(a), vlans(b)) {
        (Some(of_a), Some(of_b)) => of_a.iter().any(|vlan| of_b.contains(vlan)),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn vms_that_reach_each_other_and_have_different_mtus_are_told() {
        let vm = |name: &str, more: &str| format!("[[vm]]\nname = \"{name}\"\n{more}\n");
        let both = |of_a: &str, of_b: &str| {
            let text = vm("a", of_a) + &vm("b", of_b);
            let config = Config::parse("np.toml", &text, &BTreeMap::new()).unwrap();
            uneven_mtus(&config).collect::<Vec<_>>()
        };
        let said = "vm.b: has an MTU of 1500, and a of 9000: large packets between them vanish, \
                    except TCP's\n    fix: give both the same mtu";
        assert_eq!(both("mtu = 9000", ""), [said]);
        assert_eq!(both("mtu = 9000\nvlan = 7", "trunk = [7]").len(), 1);
        assert!(both("mtu = 9000", "mtu = 9000").is_empty());
        for apart in ["network = \"x\"", "isolated = true"] {
            assert!(both("mtu = 9000", apart).is_empty(), "{apart}");
        }
        for of_b in ["vlan = 8", "trunk = [6, 8]"] {
            assert!(both("mtu = 9000\nvlan = 7", of_b).is_empty(), "{of_b}");
        }
        assert!(both("mtu = 9000\ntrunk = [6, 8]", "trunk = [7]").is_empty());
        assert_eq!(both("mtu = 9000\ntrunk = [7]", "").len(), 1, "it is in all VLANs");
    }
}
