// SPDX-License-Identifier: Apache-2.0
//! Plots of the analysis, after VPRI Fig 9 to 11: footprints of all devices, footprint over time,
//! sections and simulated faults by access count, reuse intervals.
//!
//! This module chooses the content of the plots; `pagetide_chart` draws them.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use pagetide_access_log::{PartialFile, Service, TraceError};
use pagetide_chart::{Axis, Chart, SERIES_MAX, Scale, Series, Shape};
use pagetide_trace::AccessAnalysis;

use super::analyze_report::{Addresses, AnalyzeReport, TraceAnalysis, of_memory, range};

/// Draws the plots of a report into `dir`, which is created if necessary; returns the files.
///
/// # Errors
/// If a file cannot be written.
pub fn plot(report: &AnalyzeReport, dir: &Path) -> Result<Vec<PathBuf>, TraceError> {
    fs::create_dir_all(dir).map_err(|source| TraceError::Io {
        path: dir.to_owned(),
        source,
    })?;
    let mut files = Vec::new();
    for (number, trace) in report.traces.iter().enumerate() {
        let stem = format!("{number:02}-{}", stem(last_of(&trace.name)));
        let mut charts = vec![("footprint", footprint(trace))];
        charts.extend(
            trace
                .analysis
                .services
                .iter()
                .map(|service| match service.service {
                    Service::Block => ("block-access-counts", counts(trace, Service::Block)),
                    Service::Network => ("network-access-counts", counts(trace, Service::Network)),
                }),
        );
        charts.push(("reuse", reuse(trace)));
        for (what, chart) in charts {
            let path = dir.join(format!("{stem}-{what}.svg"));
            write(&path, &chart)?;
            files.push(path);
        }
    }
    if report.traces.len() > 1 {
        let path = dir.join("footprints.svg");
        write(&path, &footprints(report))?;
        files.push(path);
    }
    Ok(files)
}

fn write(path: &Path, chart: &Chart) -> Result<(), TraceError> {
    let (partial, mut file) = PartialFile::create(path)?;
    chart
        .svg()
        .and_then(|svg| file.write_all(svg.as_bytes()))
        .map_err(|source| partial.error(source))?;
    partial.complete(&file)
}

/// The name of a VM, or a file name without its directory.
fn last_of(name: &str) -> &str {
    name.rsplit('/').next().unwrap_or(name)
}

/// Base of a trace's file names: its name with other characters than letters, digits and `.` replaced.
fn stem(name: &str) -> String {
    name.chars()
        .map(|c| {
            if c.is_ascii_alphanumeric() || c == '.' {
                c
            } else {
                '-'
            }
        })
        .take(60)
        .collect()
}

/// The footprint of each device, grouped by VM (Fig 9b). Devices of VMs with unknown memory size are
/// left out.
fn footprints(report: &AnalyzeReport) -> Chart {
    let of = |service: Service| {
        let vms = report.traces.iter().zip(0u32..);
        vms.flat_map(|(trace, at)| {
            let devices = trace.analysis.devices.iter();
            devices
                .filter(|device| device.service == service)
                .filter_map(|device| device.footprint_share)
                .map(move |share| (f64::from(at) + 0.5, share))
        })
        .collect()
    };
    let series: Vec<_> = Service::ALL
        .map(|service| Series {
            name: service.to_string(),
            shape: Shape::Dots(of(service)),
        })
        .into();
    Chart {
        title: "Memory touched by each device".to_owned(),
        x: Axis::Things {
            name: "VM".to_owned(),
            things: report
                .traces
                .iter()
                .map(|trace| last_of(&trace.name).to_owned())
                .collect(),
        },
        y_name: "share of the VM's memory".to_owned(),
        y_max: highest(&series),
        y_scale: Scale::Shares,
        series,
        mark: None,
    }
}

fn footprint(trace: &TraceAnalysis) -> Chart {
    let analysis = &trace.analysis;
    let of_vm = analysis.memory_bytes.is_some();
    let mut series: Vec<Series> = analysis
        .devices
        .iter()
        .map(|device| Series {
            name: format!(
                "{} ({})",
                device
                    .name
                    .clone()
                    .unwrap_or_else(|| device.device.to_string()),
                device.service
            ),
            shape: Shape::Line(footprint_points(
                analysis,
                device.footprint_step_seconds,
                &device.footprint_points_sections,
            )),
        })
        .collect();
    series.sort_by(|a, b| b.shape.top().total_cmp(&a.shape.top()));
    let more = series.len().saturating_sub(SERIES_MAX);
    series.truncate(SERIES_MAX);
    let touched = match trace.addresses {
        Addresses::Disk => "parts of the disk that were asked for",
        Addresses::Memory | Addresses::PageCache => "memory touched by DMA",
    };
    let mut title = format!("{}: {touched}", last_of(&trace.name));
    if more > 0 {
        title += &format!(", the {SERIES_MAX} largest of {}", more + SERIES_MAX);
    }
    Chart {
        title,
        x: Axis::Numbers {
            name: "minutes".to_owned(),
            max: analysis.span_seconds / 60.0,
        },
        y_name: if of_vm {
            "share of the VM's memory".to_owned()
        } else {
            "MiB".to_owned()
        },
        y_max: highest(&series),
        y_scale: if of_vm { Scale::Shares } else { Scale::Plain },
        series,
        mark: None,
    }
}

#[expect(
    clippy::cast_precision_loss,
    reason = "a picture has some hundred pixels"
)]
fn footprint_points(
    analysis: &AccessAnalysis,
    step_seconds: u64,
    points: &[u64],
) -> Vec<(f64, f64)> {
    let span = analysis.span_seconds / 60.0;
    let step = step_seconds as f64 / 60.0;
    let heights = points.iter().map(|sections| {
        let bytes = sections.saturating_mul(analysis.section_bytes);
        of_memory(bytes, analysis.memory_bytes).unwrap_or(bytes as f64 / f64::from(1 << 20))
    });
    let ends = (1..).map(|step_number: u32| (f64::from(step_number) * step).min(span));
    std::iter::once((0.0, 0.0))
        .chain(ends.zip(heights))
        .collect()
}

fn counts(trace: &TraceAnalysis, service: Service) -> Chart {
    let locality = trace.analysis.service(service).map(|found| &found.locality);
    let rows: Vec<_> = locality
        .into_iter()
        .flat_map(|locality| &locality.by_access_count)
        .collect();
    let used = rows
        .iter()
        .rposition(|row| row.sections > 0)
        .map_or(0, |at| at + 1);
    let rows = rows.get(..used).unwrap_or_default();
    let series = vec![
        Series {
            name: "sections".to_owned(),
            shape: Shape::Bars(
                rows.iter()
                    .map(|row| row.sections_share.unwrap_or(0.0))
                    .collect(),
            ),
        },
        Series {
            name: "simulated faults on them".to_owned(),
            shape: Shape::Bars(
                rows.iter()
                    .map(|row| row.faults_share.unwrap_or(0.0))
                    .collect(),
            ),
        },
    ];
    Chart {
        title: format!("{}: {service}, by number of accesses", last_of(&trace.name)),
        x: Axis::Things {
            name: "accesses to a section".to_owned(),
            things: rows
                .iter()
                .map(|row| range(row.from_accesses, row.to_accesses))
                .collect(),
        },
        y_name: "share".to_owned(),
        y_max: highest(&series),
        y_scale: Scale::Shares,
        series,
        mark: None,
    }
}

/// Cumulative distribution of reuse intervals, as shares; the steps of the x axis grow with the
/// intervals.
fn reuse(trace: &TraceAnalysis) -> Chart {
    let mut things = Vec::new();
    let mut mark = None;
    let series = trace.analysis.services.iter().map(|service| {
        let mut sum = 0.0;
        things.clear();
        let points = service
            .locality
            .reuse_intervals
            .iter()
            .zip(0u32..)
            .map(|(row, at)| {
                sum += row.intervals_share.unwrap_or(0.0);
                things.push(
                    row.to_seconds
                        .map_or_else(|| "longer".to_owned(), |to| format!("{to} s")),
                );
                let limit = row.to_seconds.map(std::time::Duration::from_secs);
                if limit.is_some_and(|to| to.as_secs_f64() == trace.analysis.fault_interval_seconds)
                {
                    mark = Some((f64::from(at) + 0.5, "simulated fault →".to_owned()));
                }
                (f64::from(at) + 0.5, sum)
            })
            .collect();
        Series {
            name: service.service.to_string(),
            shape: Shape::Line(points),
        }
    });
    let series = series.collect();
    Chart {
        title: format!(
            "{}: time until a section is touched again",
            last_of(&trace.name)
        ),
        x: Axis::Things {
            name: "at most".to_owned(),
            things,
        },
        y_name: "share of the intervals".to_owned(),
        y_max: 1.0,
        y_scale: Scale::Shares,
        series,
        mark,
    }
}

fn highest(series: &[Series]) -> f64 {
    series.iter().map(|one| one.shape.top()).fold(0.0, f64::max)
}
