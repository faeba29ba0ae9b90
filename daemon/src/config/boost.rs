//! `vm.boost`: the CPU time that a VM may be favoured for.

use nightporter_boost::protocol::Budget;
use toml::de::DeValue;

use super::reader::{shown, string};

/// Milliseconds of a window: shorter ones have no boost that is worth its cost, and of longer ones
/// the neighbours notice.
const WINDOW_MS: std::ops::RangeInclusive<u64> = 10..=1000;

/// As in `"15ms/90ms"`.
pub(super) fn read(v: &DeValue<'_>) -> Result<Budget, String> {
    let text = string(v)?;
    let ms = |part: &str| part.trim().strip_suffix("ms")?.trim().parse::<u64>().ok();
    let parts = text.split_once('/').and_then(|(cpu, window)| ms(cpu).zip(ms(window)));
    let (cpu, window) = parts.ok_or_else(|| format!("{} is not a budget", shown(v)))?;
    if !WINDOW_MS.contains(&window) {
        return Err(format!("a window of {window} ms is outside 10..=1000"));
    }
    if cpu == 0 || cpu * 2 > window {
        return Err(format!("{cpu} ms are not between 1 and half of the window"));
    }
    Ok(Budget { cpu_us: cpu * 1000, window_us: window * 1000 })
}

/// As [`read`] takes it.
pub(super) fn shown_as(budget: Budget) -> String {
    format!("{}ms/{}ms", budget.cpu_us / 1000, budget.window_us / 1000)
}
