// SPDX-License-Identifier: Apache-2.0
//! The report of the bench.

use super::{
    Bench, NAME,
    peers::{Peer, PeerMeasured},
    plan::RETOUCHES,
    programs::{ProgramMeasured, Programs},
    rig::RowMeasured,
    row::{Lie, Row},
};
use crate::{
    fault::content::Kind,
    harness::{
        figures::{median, median_ratio, rounded, to_f64},
        report::BenchReport,
    },
    tiers::{FLEET_RATIO, TierBytes},
};
use serde_json::{Map, Value, json};

const PERCENTILES: [(&str, usize); 3] = [("p50", 500), ("p90", 900), ("p99", 990)];

/// Of what was measured, in `bench` and of real programs.
pub(super) fn report(bench: &Bench, programs: &Programs) -> BenchReport {
    let mut report = BenchReport::new(NAME);
    figures(bench, programs, &mut report.figures);
    let peers = [
        ("zram_lz4", &bench.peers.zram),
        ("zram_zstd", &bench.peers.zram_zstd),
        ("kernel_swap_in_file", &bench.peers.file),
    ];
    for (name, peer) in peers {
        report.peers.insert(name.into(), peer_figures(peer));
    }
    Ratios { bench, programs }.report(&mut report.ratios);
    report
}

fn figures(bench: &Bench, programs: &Programs, figures: &mut Map<String, Value>) {
    let mut tiers = Map::new();
    for rig in &bench.rows {
        tiers.insert(
            rig.row().name().into(),
            row_figures(rig.row(), &rig.measured),
        );
    }
    for (row, reason) in &bench.missing {
        tiers.insert(row.name().into(), json!(reason));
    }
    let remote = bench.rows.iter().find(|rig| rig.row() == Row::Remote);
    let remote_in = remote.map_or(Value::Null, |rig| rig.measured.cpu.report(0.0));
    let values = [
        ("tiers", tiers.into()),
        ("remote_in_us", remote_in),
        ("uffd_round_trip_us", bench.round_trip.report(0.0)),
        ("unpack_us", bench.unpack.report(0.0)),
        ("pages", bench.pages.into()),
        ("lz4_ratio_of_records", FLEET_RATIO.into()),
        ("swap_out_cpu_us_per_page", swap_out_figures(bench)),
        ("programs", programs_figures(programs)),
        ("vcpu_cpu", bench.cpus.vcpu.into()),
        ("engine_cpu", bench.cpus.engine.into()),
    ];
    for (name, value) in values {
        figures.insert(name.into(), value);
    }
}

fn row_figures(row: Row, measured: &RowMeasured) -> Value {
    let again_us = measured.device_again.us(500);
    let mut figures = Map::new();
    let mut put = |name: &str, value: Value| {
        figures.insert(name.into(), value);
    };
    put("cpu_us", measured.cpu.report(0.0));
    put("device_us", measured.device.report(again_us));
    put("device_whole_us", measured.device.report(0.0));
    put("device_present_us", measured.device_again.report(0.0));
    if !measured.settle_us.is_empty() {
        put("move_cpu_us_per_page", middle(&measured.settle_us));
    }
    let lie = &measured.settled;
    if lie.pool_pages() > 0 {
        put(
            "memory_bytes_per_page",
            each(lie.memory_bytes, lie.pool_pages()),
        );
    }
    if lie.disk_pages > 0 {
        put("disk_bytes_per_page", each(lie.disk_bytes, lie.disk_pages));
    }
    if lie.remote_pages > 0 {
        let bytes = each(lie.remote_bytes, lie.remote_pages);
        put("remote_bytes_per_page", bytes);
    }
    if matches!(row, Row::Paper | Row::PaperInTiers | Row::Zstd) {
        put("pages", pages_of(lie));
    }
    figures.into()
}

fn pages_of(lie: &Lie) -> Value {
    json!({
        "zero": lie.zero_pages,
        "same": lie.same_pages,
        "lz4": lie.lz4_pages,
        "zstd": lie.zstd_pages,
        "disk": lie.disk_pages,
        "remote": lie.remote_pages,
        "uncompressed": lie.uncompressed_pages,
    })
}

fn swap_out_figures(bench: &Bench) -> Value {
    let all = bench.swap_out.iter().flat_map(|it| &it.by_kind);
    let each = all.map(|out| {
        let sides = json!({ "ours": middle(out.ours_us()), "zram": middle(&out.zram_us) });
        (out.kind().to_string(), sides)
    });
    Value::Object(each.collect())
}

fn programs_figures(programs: &Programs) -> Value {
    let of_one = |measured: &ProgramMeasured| {
        let TierBytes {
            pages,
            lz4_bytes,
            demoted_bytes,
            zstd_pages,
        } = measured.bytes;
        let zram = match &measured.zram_bytes_per_page {
            Ok(bytes) => json!(rounded(*bytes)),
            Err(reason) => json!(reason),
        };
        json!({
            "pages": pages,
            "zstd_pages": zstd_pages,
            "lz4_bytes_per_page": each(lz4_bytes, pages),
            "zstd_bytes_per_page": each(demoted_bytes, pages),
            "zram_lz4_bytes_per_page": zram,
            "zstd_tier_bytes_over_lz4_tier": rounded(measured.bytes.zstd_over_lz4()),
        })
    };
    let named = programs.by_name.iter().map(|(name, measured)| {
        let value = match measured {
            Ok(measured) => of_one(measured),
            Err(reason) => json!(reason),
        };
        ((*name).to_owned(), value)
    });
    Value::Object(named.collect())
}

fn peer_figures(peer: &Peer) -> Value {
    if let Some(reason) = peer.missing() {
        return json!(reason);
    }
    let is_measured = |(_, measured): &&(Kind, PeerMeasured)| measured.cpu.count() > 0;
    let of_kind = |(kind, measured): &(Kind, PeerMeasured)| {
        let mut figures = Map::new();
        figures.insert("cpu_us".into(), measured.cpu.report(0.0));
        figures.insert(
            "swap_out_cpu_us_per_page".into(),
            middle(&measured.swap_out_us),
        );
        if !measured.bytes_per_page.is_empty() {
            let bytes = middle(&measured.bytes_per_page);
            figures.insert("memory_bytes_per_page".into(), bytes);
        }
        (kind.to_string(), figures.into())
    };
    Value::Object(
        peer.by_kind
            .iter()
            .filter(is_measured)
            .map(of_kind)
            .collect(),
    )
}

fn middle(values: &[f64]) -> Value {
    rounded(median(values.iter().copied())).into()
}

fn each(total: u64, count: u64) -> Value {
    rounded(to_f64(total) / to_f64(count.max(1))).into()
}

/// The ratios of a run; null where a side is missing.
struct Ratios<'a> {
    bench: &'a Bench,
    programs: &'a Programs,
}

impl Ratios<'_> {
    fn row(&self, row: Row) -> Option<&RowMeasured> {
        let found = self.bench.rows.iter().find(|rig| rig.row() == row);
        found.map(|rig| &rig.measured)
    }

    fn report(&self, ratios: &mut Map<String, Value>) {
        let mut put = |name: String, ratio: Option<f64>| {
            let finite = ratio.filter(|it| it.is_finite());
            ratios.insert(name, finite.map(rounded).into());
        };
        for (name, permille) in PERCENTILES {
            put(format!("cpu_over_zram_{name}"), self.cpu(permille));
            put(format!("device_over_zram_{name}"), self.device(permille));
            let round_trip = self.bench.round_trip.us(permille);
            let floor = self.zram_us(permille).map(|zram| round_trip / zram);
            put(format!("uffd_round_trip_over_zram_{name}"), floor);
            let least = round_trip + self.bench.unpack.us(permille);
            let least = self.zram_us(permille).map(|zram| least / zram);
            put(format!("floor_over_zram_{name}"), least);
        }
        for (number, (name, _)) in RETOUCHES.iter().enumerate() {
            put(format!("retouch_{name}_over_zram"), self.retouch(number));
        }
        for kind in [Kind::Records, Kind::Paper] {
            let ratio = self.swap_out(kind);
            put(format!("swap_out_cpu_of_{kind}_over_zram"), ratio);
        }
        put(
            "swap_out_cpu_over_zram".into(),
            worst([self.swap_out(Kind::Records), self.swap_out(Kind::Paper)]),
        );
        let programs = self.programs.all().map(|bytes| bytes.zstd_over_lz4());
        let records = self.zstd_over_lz4();
        let zstd = "zstd_tier_bytes_over_lz4_tier";
        put(format!("{zstd}_of_records"), records);
        put(format!("{zstd}_of_programs"), programs);
        put(zstd.into(), worst([records, programs]));
        put(
            "zstd_tier_bytes_over_zram_zstd".into(),
            self.zstd_over_zram_zstd(),
        );
        put("lz4_tier_bytes_over_zram".into(), self.lz4_over_zram());
        let round_trip_us = self.bench.round_trip.us(500);
        put(
            "disk_in_p50_over_kernel_swap".into(),
            self.disk_in_less(round_trip_us),
        );
        put(
            "disk_in_whole_p50_over_kernel_swap".into(),
            self.disk_in_less(0.0),
        );
    }

    fn zram_us(&self, permille: usize) -> Option<f64> {
        let zram = self.bench.peers.zram.of(Kind::Records)?;
        Some(zram.cpu.us(permille))
    }

    fn cpu(&self, permille: usize) -> Option<f64> {
        let ours = self.row(Row::Lz4)?.cpu.us(permille);
        Some(ours / self.zram_us(permille)?)
    }

    fn device(&self, permille: usize) -> Option<f64> {
        let ours = self.row(Row::Lz4)?;
        let us = ours.device.us(permille) - ours.device_again.us(500);
        Some(us / self.zram_us(permille)?)
    }

    fn retouch(&self, number: usize) -> Option<f64> {
        let ours = &self.bench.retouch.as_ref()?.took[number];
        Some(ours.whole_over(&self.bench.peers.retouched[number]))
    }

    fn swap_out(&self, kind: Kind) -> Option<f64> {
        let mut all = self.bench.swap_out.as_ref()?.by_kind.iter();
        let out = all.find(|out| out.kind() == kind)?;
        Some(median_ratio(out.ours_us(), &out.zram_us, |us| *us))
    }

    /// Of a page that zstd may take, memory after over before.
    fn zstd_over_lz4(&self) -> Option<f64> {
        let zstd = self.row(Row::Zstd)?;
        let bytes = |lie: &Lie| to_f64(lie.memory_bytes);
        Some(bytes(&zstd.settled) / bytes(&zstd.evicted))
    }

    fn zstd_over_zram_zstd(&self) -> Option<f64> {
        let zstd = &self.row(Row::Zstd)?.settled;
        let zram = self.bench.peers.zram_zstd.of(Kind::Records)?;
        let each = to_f64(zstd.memory_bytes) / to_f64(zstd.pool_pages());
        Some(each / median(zram.bytes_per_page.iter().copied()))
    }

    fn lz4_over_zram(&self) -> Option<f64> {
        let lz4 = &self.row(Row::Lz4)?.settled;
        let zram = self.bench.peers.zram.of(Kind::Records)?;
        let each = to_f64(lz4.memory_bytes) / to_f64(lz4.pool_pages());
        Some(each / median(zram.bytes_per_page.iter().copied()))
    }

    fn disk_in_less(&self, us: f64) -> Option<f64> {
        let ours = self.row(Row::Disk)?.cpu.us(500);
        let file = self.bench.peers.file.of(Kind::Records)?.cpu.us(500);
        Some((ours - us) / file)
    }
}

/// The larger of two ratios; none if one is missing.
fn worst(ratios: [Option<f64>; 2]) -> Option<f64> {
    let [one, other] = ratios;
    Some(one?.max(other?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worse_of_two_is_known_only_with_both() {
        assert_eq!(worst([Some(1.0), Some(2.0)]), Some(2.0));
        assert_eq!(worst([Some(1.0), None]), None);
    }
}
