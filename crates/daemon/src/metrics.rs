// SPDX-License-Identifier: Apache-2.0
//! The metrics page: the figures of all reports as `OpenMetrics` text, and
//! their documentation.
//!
//! Nothing is counted here. A page is made anew for each scrape from the
//! reports, and what it holds follows from the tables of [`Figure`]s.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

use crate::budget::{self, HostReport};
use crate::control::{DeviceReport, VmReport, VmState};
use crate::figure::{BUCKET_BOUNDS_US, Figure, FigureKind, LatencyUs, Reading, Report};
use crate::pool::{PoolReport, TierReport};
use crate::scheduler::SchedulerClassReport;
use crate::slo::{SloList, SloWindowReport};

/// Content type of the page.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Metric of VMs that are served but not evicted, beside the figures of the reports.
const EVICTING: (&str, &str) = (
    "pagetide_vm_evicting",
    "1 if cold pages of the VM are evicted, 0 while something forbids it",
);

/// What the page tells.
#[derive(Debug, Default)]
pub struct Reports {
    /// The host, if this process has VMs.
    pub host: Option<HostReport>,
    /// VMs.
    pub vms: Vec<VmReport>,
    /// Devices.
    pub devices: Vec<DeviceReport>,
    /// The pools of all VMs, if this process has VMs.
    pub pools: Vec<PoolReport>,
    /// Service levels.
    pub slo: SloList,
    /// Classes of the scheduler.
    pub classes: Vec<SchedulerClassReport>,
}

/// The page.
pub fn page(reports: Reports) -> Result<String, fmt::Error> {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(reports));
    let mut page = String::new();
    prometheus_client::encoding::text::encode(&mut page, &registry)?;
    Ok(page)
}

impl Collector for Reports {
    fn encode(&self, mut encoder: DescriptorEncoder) -> fmt::Result {
        if let Some(host) = &self.host {
            budget::metrics::encode(&mut encoder, host)?;
        }
        encode_all(&mut encoder, &self.vms)?;
        encode_all(&mut encoder, &self.devices)?;
        encode_all(&mut encoder, &self.pools)?;
        let tiers: Vec<TierReport> = (self.pools.iter())
            .flat_map(|pool| pool.tiers.iter().cloned())
            .collect();
        encode_all(&mut encoder, &tiers)?;
        encode_accounts(&mut encoder, &self.slo)?;
        encode_all(&mut encoder, &self.classes)?;
        if self.vms.is_empty() {
            return Ok(());
        }
        let (name, help) = EVICTING;
        let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for vm in &self.vms {
            let evicting = i64::from(vm.state == VmState::Attached);
            metric
                .encode_family(&[vm.label()])?
                .encode_gauge(&evicting)?;
        }
        Ok(())
    }
}

fn encode_all<R: Report>(encoder: &mut DescriptorEncoder, reports: &[R]) -> fmt::Result {
    for figure in R::FIGURES {
        let mut readings = reports
            .iter()
            .filter_map(|report| (figure.read)(report).map(|reading| (report.label(), reading)))
            .peekable();
        if readings.peek().is_none() {
            continue;
        }
        let name = metric_name(figure);
        let mut metric = encoder.encode_descriptor(
            &name,
            figure.help.trim_ascii(),
            None,
            metric_type(figure),
        )?;
        for (label, reading) in readings {
            encode_one(&mut metric, label, figure.kind, reading)?;
        }
    }
    Ok(())
}

/// Figures of windows have two labels: the device and the window.
fn encode_accounts(encoder: &mut DescriptorEncoder, accounts: &SloList) -> fmt::Result {
    for figure in SloWindowReport::FIGURES {
        let windows = accounts.devices.iter().flat_map(|account| {
            let device = ("device", account.device.as_str());
            let windows = account.windows.iter();
            windows.filter_map(move |w| Some((device, w.label(), (figure.read)(w)?)))
        });
        let mut windows = windows.peekable();
        if windows.peek().is_none() {
            continue;
        }
        let (name, help) = (metric_name(figure), figure.help.trim_ascii());
        let mut metric = encoder.encode_descriptor(&name, help, None, metric_type(figure))?;
        for (device, window, reading) in windows {
            let labels = [device, window];
            let mut one = metric.encode_family(&labels)?;
            match reading {
                Reading::Whole(number) => one.encode_gauge(&number)?,
                Reading::Real(number) => one.encode_gauge(&number)?,
                Reading::Latency(_) | Reading::Sets(_) => {}
            }
        }
    }
    Ok(())
}

fn encode_one(
    metric: &mut MetricEncoder,
    label: (&str, &str),
    kind: FigureKind,
    reading: Reading,
) -> fmt::Result {
    let labels = [label];
    if let Reading::Sets(sets) = reading {
        for set in sets {
            let labels = [label, ("set", set.set.as_str())];
            metric.encode_family(&labels)?.encode_gauge(&set.sections)?;
        }
        return Ok(());
    }
    let mut one = metric.encode_family(&labels)?;
    let no_exemplar =
        None::<&prometheus_client::metrics::exemplar::Exemplar<[(&str, &str); 0], f64>>;
    match (kind, reading) {
        (FigureKind::Counter, Reading::Whole(number)) => one.encode_counter(&number, no_exemplar),
        (FigureKind::Counter, Reading::Real(number)) => one.encode_counter(&number, no_exemplar),
        (_, Reading::Whole(number)) => one.encode_gauge(&number),
        (_, Reading::Real(number)) => one.encode_gauge(&number),
        (_, Reading::Latency(latency)) => encode_latency(&mut one, latency),
        (_, Reading::Sets(_)) => Ok(()),
    }
}

fn encode_latency(metric: &mut MetricEncoder, latency: &LatencyUs) -> fmt::Result {
    #[expect(clippy::cast_precision_loss, reason = "bounds are at most a million")]
    let bounds = BUCKET_BOUNDS_US.map(|bound| bound as f64);
    let buckets: Vec<(f64, u64)> = bounds
        .into_iter()
        .chain([f64::INFINITY])
        .zip(latency.buckets.counts)
        .collect();
    let count = latency.buckets.counts.iter().sum();
    metric.encode_histogram::<[(&str, &str); 0]>(latency.buckets.sum_us, count, &buckets, None)
}

fn metric_name<R: Report>(figure: &Figure<R>) -> String {
    format!("{}_{}", R::METRIC_PREFIX, figure.name)
}

fn metric_type<R>(figure: &Figure<R>) -> MetricType {
    match figure.kind {
        FigureKind::Gauge | FigureKind::PerSet => MetricType::Gauge,
        FigureKind::Counter => MetricType::Counter,
        FigureKind::Histogram => MetricType::Histogram,
    }
}

/// The page `docs/metrics.md`.
#[must_use]
pub fn documentation() -> String {
    let mut page = String::from(
        "# Metrics\n\n\
         Made from `crates/daemon/src/control.rs`, `slo.rs` and `scheduler/mod.rs` beside it; do not edit.\n\n\
         `GET /metrics` on the API socket answers with OpenMetrics text. Names carry their unit;\n\
         counters end in `_total`. The same figures stand in `pagetide vm show --json`,\n\
         `pagetide dpu list --json`, `pagetide pool show --json` and `pagetide dpu slo --json`, there\n\
         latencies as percentiles.\n\n\
         | metric | kind | labels | meaning |\n|---|---|---|---|\n",
    );
    budget::metrics::document(&mut page);
    document::<VmReport>(&mut page);
    let (name, help) = EVICTING;
    page += &format!("| `{name}` | gauge | `vm` | {help}. |\n");
    document::<DeviceReport>(&mut page);
    document::<PoolReport>(&mut page);
    document::<TierReport>(&mut page);
    document_accounts(&mut page);
    document::<SchedulerClassReport>(&mut page);
    page += "\nBuckets of latencies, in microseconds: ";
    page += &BUCKET_BOUNDS_US.map(|bound| bound.to_string()).join(", ");
    page += ".\n";
    page
}

fn document<R: Report + Default>(page: &mut String) {
    let report = R::default();
    let label = report.label().0;
    for figure in R::FIGURES {
        let name = metric_name(figure);
        let (name, kind, labels) = match figure.kind {
            FigureKind::Gauge => (name, "gauge", format!("`{label}`")),
            FigureKind::Counter => (name + "_total", "counter", format!("`{label}`")),
            FigureKind::Histogram => (name, "histogram", format!("`{label}`, `le`")),
            FigureKind::PerSet => (name, "gauge", format!("`{label}`, `set`")),
        };
        let help = figure.help.trim_ascii();
        *page += &format!("| `{name}` | {kind} | {labels} | {help} |\n");
    }
}

fn document_accounts(page: &mut String) {
    for figure in SloWindowReport::FIGURES {
        let (name, help) = (metric_name(figure), figure.help.trim_ascii());
        *page += &format!("| `{name}` | gauge | `device`, `window` | {help} |\n");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::SetReport;
    use crate::slo::SloReport;

    fn vm(name: &str) -> VmReport {
        let mut histogram = hdrhistogram::Histogram::<u64>::new(3).unwrap();
        histogram.record(7_000).unwrap();
        VmReport {
            name: name.into(),
            resident_bytes: 4096,
            vcpu_faults: 17,
            vcpu_fault_us: LatencyUs::from_ns(&histogram),
            reader_cpu_seconds: 0.5,
            sections: vec![SetReport {
                set: "cold".into(),
                sections: 3,
            }],
            ..VmReport::default()
        }
    }

    #[test]
    fn page_tells_each_kind_of_figure_in_its_form() {
        let page = page(Reports {
            vms: vec![vm("a"), vm("b")],
            ..Reports::default()
        })
        .unwrap();
        for line in [
            "pagetide_vm_resident_bytes{vm=\"a\"} 4096",
            "pagetide_vm_vcpu_faults_total{vm=\"b\"} 17",
            "pagetide_vm_reader_cpu_seconds_total{vm=\"a\"} 0.5",
            "pagetide_vm_vcpu_fault_us_bucket{le=\"5.0\",vm=\"a\"} 0",
            "pagetide_vm_vcpu_fault_us_bucket{le=\"10.0\",vm=\"a\"} 1",
            "pagetide_vm_vcpu_fault_us_bucket{le=\"+Inf\",vm=\"a\"} 1",
            "pagetide_vm_sections{vm=\"a\",set=\"cold\"} 3",
            "pagetide_vm_evicting{vm=\"a\"} 1",
            "# EOF",
        ] {
            assert!(page.lines().any(|l| l == line), "no {line} in\n{page}");
        }
        assert!(
            !page.contains("limit_bytes"),
            "a VM without a limit has none"
        );
    }

    #[test]
    fn windows_of_accounts_are_told_with_device_and_window_and_without_what_is_absent() {
        let window = |name: &str, least_iops| SloWindowReport {
            window: name.into(),
            p999_us: Some(88.5),
            least_iops,
            ..SloWindowReport::default()
        };
        let account = SloReport {
            device: "/d".into(),
            windows: vec![window("minute", Some(40)), window("hour", None)],
            ..SloReport::default()
        };
        let devices = vec![account];
        let page = page(Reports {
            slo: SloList { devices },
            ..Reports::default()
        })
        .unwrap();
        for line in [
            "pagetide_slo_p999_us{device=\"/d\",window=\"hour\"} 88.5",
            "pagetide_slo_least_iops{device=\"/d\",window=\"minute\"} 40",
        ] {
            assert!(page.lines().any(|l| l == line), "no {line} in\n{page}");
        }
        assert!(!page.contains("least_iops{device=\"/d\",window=\"hour\"}"));
    }

    #[test]
    fn page_without_vms_and_host_holds_nothing() {
        let page = page(Reports::default()).unwrap();
        assert_eq!(page, "# EOF\n");
    }

    #[test]
    fn budget_is_told_without_labels_and_shares_of_vms_with_them() {
        let host = HostReport {
            budget_bytes: Some(7),
            free_bytes: Some(3),
            water: Some(budget::WaterState::Between),
            ..HostReport::default()
        };
        let shared = VmReport {
            weight: 100,
            target_bytes: Some(5),
            ..vm("a")
        };
        let page = page(Reports {
            host: Some(host),
            vms: vec![shared],
            ..Reports::default()
        })
        .unwrap();
        for line in [
            "pagetide_host_budget_bytes 7",
            "pagetide_host_free_bytes 3",
            "pagetide_host_water 2",
            "pagetide_vm_weight{vm=\"a\"} 100",
            "pagetide_vm_target_bytes{vm=\"a\"} 5",
        ] {
            assert!(page.lines().any(|l| l == line), "no {line} in\n{page}");
        }
    }

    #[test]
    fn label_that_needs_quoting_is_quoted() {
        let page = page(Reports {
            vms: vec![vm("a\"b\n")],
            ..Reports::default()
        })
        .unwrap();
        assert!(page.contains(r#"vm="a\"b\n""#), "{page}");
    }
}
