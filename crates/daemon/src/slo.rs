// SPDX-License-Identifier: Apache-2.0
//! Service-level accounts in the API and `pagetide dpu slo` (VPRI 2.2, 3.4).

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::figure::report;
use pagetide_report::size::readable;
use pagetide_report::text::{Text, table};

/// Slow requests of one cause.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct SlowCauseReport {
    /// What held them longest, such as `disk` or `parked: waiting for the host`.
    pub cause: String,
    /// Number of them.
    pub requests: u64,
}

report! {
    /// A window of a device's account, which reaches back from now.
    pub struct SloWindowReport in "pagetide_slo" {
        /// Which window: `minute`, `hour` or `day`.
        window: String => label "window",
        /// How far the window reaches back: for its length and up to a sixth of it more, less only while the device is that young.
        covers_seconds: f64 => gauge,
        /// Requests completed within the window.
        requests: u64 => gauge,
        /// Data moved by requests within the window.
        bytes: u64 => gauge,
        /// Half of the requests were as fast as this, from being taken from the ring to the used ring; absent without requests, as those that follow.
        p50_us: Option<f64> => gauge,
        /// All requests but one in a hundred were as fast as this.
        p99_us: Option<f64> => gauge,
        /// All requests but one in a thousand were as fast as this.
        p999_us: Option<f64> => gauge,
        /// All requests but one in ten thousand were as fast as this.
        p9999_us: Option<f64> => gauge,
        /// The slowest request.
        worst_us: Option<f64> => gauge,
        /// Time with demand: bins of 100 ms for nine tenths of which requests were in flight.
        demand_seconds: f64 => gauge,
        /// Requests a second in the slowest bin with demand; absent without demand.
        least_iops: Option<u64> => gauge,
        /// Bytes a second in the slowest bin with demand; absent without demand.
        least_bytes_per_second: Option<u64> => gauge,
        /// I/O page faults within the window: page requests that something waited for.
        iopfs: u64 => gauge,
        /// Requests made to fault by injection within the window.
        injected_iopfs: u64 => gauge,
        /// Most I/O page faults within a second.
        iopf_peak_per_second: u64 => gauge,
        /// Times that more than 5 I/O page faults came within a second.
        iopf_bursts: u64 => gauge,
        /// Requests slower than ten times the last minute's median and than 1 ms.
        slow_requests: u64 => gauge,
        /// Slow requests by what held them.
        slow_causes: Vec<SlowCauseReport> => skip,
    }
}

/// A slow request.
#[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct SlowRequestReport {
    /// How long ago it was completed.
    pub ago_seconds: f64,
    /// Queue it came by.
    pub queue: u16,
    /// Data it moved.
    pub bytes: u64,
    /// From being taken from the ring to the used ring.
    pub latency_us: f64,
    /// What held it longest.
    pub cause: String,
    /// How long that held it.
    pub held_us: f64,
    /// Its fault was injected.
    pub injected: bool,
}

/// What faults have cost the packets that a queue pair of a network device received, since the device was made.
#[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct PairSloReport {
    /// Number of the pair.
    pub pair: u16,
    /// Packets lost to a fault.
    pub fault_dropped_packets: u64,
    /// Packets that have waited in the store for their buffers.
    pub parked_packets: u64,
    /// Half of them waited no longer than this; absent without any, as those that follow.
    pub parked_p50_us: Option<f64>,
    /// All but one in a hundred waited no longer than this.
    pub parked_p99_us: Option<f64>,
    /// The longest wait.
    pub parked_max_us: Option<f64>,
    /// All waits together.
    pub parked_total_us: f64,
}

/// The account of service levels of one device.
#[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct SloReport {
    /// Socket of the device.
    pub device: String,
    /// Its serial number.
    pub serial: Option<String>,
    /// The last minute, hour and day.
    pub windows: Vec<SloWindowReport>,
    /// What takes longer is slow: ten times the last minute's median, 1 ms at least.
    pub slow_threshold_us: f64,
    /// Slow requests since the device was made.
    pub slow_requests: u64,
    /// The last 64 of them, newest first.
    pub slow: Vec<SlowRequestReport>,
    /// Memory that the account takes.
    pub memory_bytes: u64,
    /// Of a network device: its queue pairs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pairs: Vec<PairSloReport>,
}

/// Accounts of devices.
#[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct SloList {
    /// By socket.
    pub devices: Vec<SloReport>,
}

/// Slow requests listed in the text; the JSON has all that are kept.
const SLOW_LISTED: usize = 10;

impl Text for SloList {
    fn text(&self) -> String {
        let texts: Vec<String> = self.devices.iter().map(device_text).collect();
        texts.join("\n")
    }
}

fn device_text(device: &SloReport) -> String {
    let serial = device.serial.as_deref().unwrap_or("-");
    let mut text = format!(
        "{} (serial {serial}): {} slow since it was made, slow is above {}\n",
        device.device,
        count(device.slow_requests, "request"),
        latency(device.slow_threshold_us)
    );
    text += &table(&latency_rows(&device.windows));
    text += &table(&rate_rows(&device.windows));
    for window in &device.windows {
        let causes: Vec<String> = window
            .slow_causes
            .iter()
            .map(|cause| format!("{} {}", cause.requests, cause.cause))
            .collect();
        if !causes.is_empty() {
            text += &format!(
                "slow in the last {}: {}\n",
                window.window,
                causes.join("; ")
            );
        }
    }
    let pairs: Vec<&PairSloReport> = (device.pairs.iter())
        .filter(|pair| pair.fault_dropped_packets + pair.parked_packets > 0)
        .collect();
    if !pairs.is_empty() {
        text += &table(&pair_rows(&pairs));
    }
    if !device.slow.is_empty() {
        text += &table(&slow_rows(&device.slow));
    }
    text
}

fn pair_rows(pairs: &[&PairSloReport]) -> Vec<[String; 6]> {
    let head = ["PAIR", "LOST TO FAULTS", "PARKED", "P50", "P99", "LONGEST"];
    let mut rows = vec![head.map(str::to_owned)];
    let of_some = |us: Option<f64>| us.map_or_else(|| "-".to_owned(), latency);
    rows.extend(pairs.iter().map(|pair| {
        [
            pair.pair.to_string(),
            pair.fault_dropped_packets.to_string(),
            pair.parked_packets.to_string(),
            of_some(pair.parked_p50_us),
            of_some(pair.parked_p99_us),
            of_some(pair.parked_max_us),
        ]
    }));
    rows
}

fn latency_rows(windows: &[SloWindowReport]) -> Vec<[String; 9]> {
    let head = [
        "LAST", "COVERS", "REQUESTS", "P50", "P99", "P99.9", "P99.99", "WORST", "SLOW",
    ];
    let mut rows = vec![head.map(String::from)];
    rows.extend(windows.iter().map(|w| {
        [
            w.window.clone(),
            format!("{:.0} s", w.covers_seconds),
            w.requests.to_string(),
            maybe(w.p50_us, latency),
            maybe(w.p99_us, latency),
            maybe(w.p999_us, latency),
            maybe(w.p9999_us, latency),
            maybe(w.worst_us, latency),
            w.slow_requests.to_string(),
        ]
    }));
    rows
}

fn rate_rows(windows: &[SloWindowReport]) -> Vec<[String; 8]> {
    let head = [
        "LAST",
        "DEMAND",
        "LEAST IOPS",
        "LEAST RATE",
        "IOPFS",
        "INJECTED",
        "PEAK/S",
        "BURSTS",
    ];
    let mut rows = vec![head.map(String::from)];
    rows.extend(windows.iter().map(|w| {
        [
            w.window.clone(),
            format!("{:.1} s", w.demand_seconds),
            maybe(w.least_iops, |iops| iops.to_string()),
            maybe(w.least_bytes_per_second, |b| readable(b) + "/s"),
            w.iopfs.to_string(),
            w.injected_iopfs.to_string(),
            w.iopf_peak_per_second.to_string(),
            w.iopf_bursts.to_string(),
        ]
    }));
    rows
}

fn slow_rows(slow: &[SlowRequestReport]) -> Vec<[String; 6]> {
    let head = ["AGO", "QUEUE", "BYTES", "LATENCY", "HELD", "BY"];
    let mut rows = vec![head.map(String::from)];
    rows.extend(slow.iter().take(SLOW_LISTED).map(|request| {
        let injected = if request.injected { " (injected)" } else { "" };
        [
            format!("{:.1} s", request.ago_seconds),
            request.queue.to_string(),
            readable(request.bytes),
            latency(request.latency_us),
            latency(request.held_us),
            format!("{}{injected}", request.cause),
        ]
    }));
    rows
}

fn count(number: u64, what: &str) -> String {
    match number {
        1 => format!("1 {what}"),
        _ => format!("{number} {what}s"),
    }
}

fn maybe<T>(value: Option<T>, text: impl Fn(T) -> String) -> String {
    value.map_or_else(|| "-".to_owned(), text)
}

/// Converts microseconds to a readable unit.
pub(crate) fn latency(us: f64) -> String {
    if us < 1_000.0 {
        format!("{us:.0} us")
    } else if us < 1_000_000.0 {
        format!("{:.1} ms", us / 1e3)
    } else {
        format!("{:.1} s", us / 1e6)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn account() -> SloReport {
        SloReport {
            device: "/run/d.sock".into(),
            serial: Some("disk-1".into()),
            windows: vec![
                SloWindowReport {
                    window: "minute".into(),
                    covers_seconds: 65.0,
                    requests: 120_000,
                    p50_us: Some(88.0),
                    p9999_us: Some(5_120.0),
                    worst_us: Some(1_250_000.0),
                    demand_seconds: 12.3,
                    least_iops: Some(40),
                    least_bytes_per_second: Some(163_840),
                    iopfs: 12,
                    iopf_bursts: 1,
                    slow_requests: 3,
                    slow_causes: vec![SlowCauseReport {
                        cause: "disk".into(),
                        requests: 3,
                    }],
                    ..SloWindowReport::default()
                },
                SloWindowReport {
                    window: "hour".into(),
                    ..SloWindowReport::default()
                },
            ],
            slow_threshold_us: 1_000.0,
            slow_requests: 1,
            slow: vec![SlowRequestReport {
                cause: "parked: waiting for the host".into(),
                injected: true,
                latency_us: 5_300.0,
                held_us: 5_000.0,
                bytes: 4096,
                ..SlowRequestReport::default()
            }],
            ..SloReport::default()
        }
    }

    #[test]
    fn account_as_text_is_tables_with_units_and_a_dash_for_what_is_absent() {
        let text = SloList {
            devices: vec![account()],
        }
        .text();
        assert_eq!(
            text,
            "/run/d.sock (serial disk-1): 1 request slow since it was made, slow is above 1.0 ms\n\
             LAST    COVERS  REQUESTS  P50    P99  P99.9  P99.99  WORST  SLOW\n\
             minute  65 s    120000    88 us  -    -      5.1 ms  1.2 s  3\n\
             hour    0 s     0         -      -    -      -       -      0\n\
             LAST    DEMAND  LEAST IOPS  LEAST RATE   IOPFS  INJECTED  PEAK/S  BURSTS\n\
             minute  12.3 s  40          160.0 KiB/s  12     0         0       1\n\
             hour    0.0 s   -           -            0      0         0       0\n\
             slow in the last minute: 3 disk\n\
             AGO    QUEUE  BYTES    LATENCY  HELD    BY\n\
             0.0 s  0      4.0 KiB  5.3 ms   5.0 ms  parked: waiting for the host (injected)\n"
        );
    }

    #[test]
    fn accounts_of_several_devices_stand_apart_and_none_is_nothing() {
        let devices = vec![account(), account()];
        let text = SloList { devices }.text();
        assert_eq!(text.matches("\n\n/run/d.sock").count(), 1);
        assert_eq!(SloList::default().text(), "");
    }
}
