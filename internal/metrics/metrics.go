// Package metrics counts what the server does, for Prometheus. It has its own
// registry, so nothing a library registers by itself appears in it, and no label
// holds a tenant's name, a handle or anything else a caller chose (P10: the
// number of series is bounded).
//
// Every method may be called on a nil *Metrics and then does nothing, so that a
// part can be built without it.
package metrics

import (
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
)

// Metrics is a set of counters and its registry. Methods may be called from any
// goroutine.
type Metrics struct {
	registry *prometheus.Registry

	requests  *prometheus.CounterVec
	durations *prometheus.HistogramVec
	inFlight  prometheus.Gauge
	attached  prometheus.Gauge

	opens       *prometheus.CounterVec
	openTime    prometheus.Histogram
	closes      *prometheus.CounterVec
	closeTime   prometheus.Histogram
	fences      *prometheus.CounterVec
	bytesIn     prometheus.Counter
	bytesOut    prometheus.Counter
	commits     *prometheus.CounterVec
	commitTime  prometheus.Histogram
	processes   *prometheus.GaugeVec
	targetUp    *prometheus.GaugeVec
	targetBoxes *prometheus.GaugeVec
	targetProcs *prometheus.GaugeVec
	targetFence *prometheus.GaugeVec
	owners      prometheus.Gauge
	unheard     prometheus.Gauge
	streams     prometheus.Gauge
}

// New makes an empty set. The version appears as the label of stockade_info.
func New(version string) *Metrics {
	m := &Metrics{
		registry: prometheus.NewRegistry(),
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "stockade_http_requests_total",
			Help: "Answered requests, by operation and status."}, []string{"operation", "status"}),
		durations: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "stockade_http_request_seconds",
			Help:    "Time from a request's header to the end of its answer, long polls and streams included.",
			Buckets: prometheus.ExponentialBuckets(0.0005, 4, 10)}, []string{"operation"}),
		inFlight: prometheus.NewGauge(prometheus.GaugeOpts{Name: "stockade_http_requests_in_flight",
			Help: "Requests being answered now, attached sockets included."}),
		attached: prometheus.NewGauge(prometheus.GaugeOpts{Name: "stockade_attached_sockets",
			Help: "Attach WebSockets open now."}),
		opens: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "stockade_opens_total",
			Help: "Opens of processes, by outcome: new, repeated, or the code of the refusal."}, []string{"outcome"}),
		openTime: prometheus.NewHistogram(prometheus.HistogramOpts{Name: "stockade_open_seconds",
			Help: "Time the broker took for an open.", Buckets: prometheus.ExponentialBuckets(0.00025, 2, 14)}),
		closes: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "stockade_closes_total",
			Help: "Closes of processes, by outcome: quiescent, unproven, or the code of the refusal."}, []string{"outcome"}),
		closeTime: prometheus.NewHistogram(prometheus.HistogramOpts{Name: "stockade_close_seconds",
			Help: "Time from a close to its answer, grace included.", Buckets: prometheus.ExponentialBuckets(0.001, 3, 12)}),
		fences: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "stockade_fences_total",
			Help: "Fences, by event: raised, cleared."}, []string{"event"}),
		bytesIn: prometheus.NewCounter(prometheus.CounterOpts{Name: "stockade_stdin_bytes_total",
			Help: "Input bytes accepted for processes."}),
		bytesOut: prometheus.NewCounter(prometheus.CounterOpts{Name: "stockade_output_bytes_total",
			Help: "Log bytes sent to readers, frame headers included."}),
		commits: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "stockade_ledger_commits_total",
			Help: "Ledger commits, by result: ok or error."}, []string{"result"}),
		commitTime: prometheus.NewHistogram(prometheus.HistogramOpts{Name: "stockade_ledger_commit_seconds",
			Help: "Time of one durable ledger commit.", Buckets: prometheus.ExponentialBuckets(0.0001, 2, 15)}),
		processes: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "stockade_processes",
			Help: "Processes the broker watches now, by state."}, []string{"state"}),
		targetUp: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "stockade_target_up",
			Help: "1 if the host program of the target answers."}, []string{"target"}),
		targetBoxes: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "stockade_target_boxes",
			Help: "Boxes of the target."}, []string{"target"}),
		targetProcs: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "stockade_target_processes",
			Help: "Live processes of the target."}, []string{"target"}),
		targetFence: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "stockade_target_fences",
			Help: "Standing fences of the target."}, []string{"target"}),
		owners: prometheus.NewGauge(prometheus.GaugeOpts{Name: "stockade_processes_owned",
			Help: "Processes the broker owns now: those that may be running, and fenced ones."}),
		unheard: prometheus.NewGauge(prometheus.GaugeOpts{Name: "stockade_processes_unclassified",
			Help: "Of the owned processes, those not heard of since this server started."}),
		streams: prometheus.NewGauge(prometheus.GaugeOpts{Name: "stockade_log_readers",
			Help: "Calls that read a log now."}),
	}
	info := prometheus.NewGauge(prometheus.GaugeOpts{Name: "stockade_info", Help: "Always 1.",
		ConstLabels: prometheus.Labels{"version": version}})
	info.Set(1)
	m.registry.MustRegister(info, m.requests, m.durations, m.inFlight, m.attached, m.opens, m.openTime, m.closes,
		m.closeTime, m.fences, m.bytesIn, m.bytesOut, m.commits, m.commitTime, m.processes, m.targetUp,
		m.targetBoxes, m.targetProcs, m.targetFence, m.owners, m.unheard, m.streams,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// Handler serves the set in the Prometheus text form.
func (m *Metrics) Handler() http.Handler {
	if m == nil {
		return http.NotFoundHandler()
	}
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{MaxRequestsInFlight: 4})
}

// Begin counts a request in flight and returns what ends it. The operation must
// be one of a fixed set.
func (m *Metrics) Begin(operation string) (end func(status int)) {
	if m == nil {
		return func(int) {}
	}
	start := time.Now()
	m.inFlight.Inc()
	return func(status int) {
		m.inFlight.Dec()
		m.requests.WithLabelValues(operation, strconv.Itoa(status)).Inc()
		m.durations.WithLabelValues(operation).Observe(time.Since(start).Seconds())
	}
}

// Attached adds n (1 or -1) to the number of open attach sockets.
func (m *Metrics) Attached(n int) {
	if m != nil {
		m.attached.Add(float64(n))
	}
}

// Opened records an open that took d: a new process, a repeated request, or err.
func (m *Metrics) Opened(repeated bool, err error, d time.Duration) {
	if m == nil {
		return
	}
	outcome := "new"
	switch {
	case err != nil:
		outcome = string(errdefs.CodeOf(err))
	case repeated:
		outcome = "repeated"
	}
	m.opens.WithLabelValues(outcome).Inc()
	m.openTime.Observe(d.Seconds())
}

// Closed records a close that took d.
func (m *Metrics) Closed(quiescent bool, err error, d time.Duration) {
	if m == nil {
		return
	}
	outcome := "unproven"
	switch {
	case err != nil:
		outcome = string(errdefs.CodeOf(err))
	case quiescent:
		outcome = "quiescent"
	}
	m.closes.WithLabelValues(outcome).Inc()
	m.closeTime.Observe(d.Seconds())
}

// FenceRaised counts a new fence.
func (m *Metrics) FenceRaised() {
	if m != nil {
		m.fences.WithLabelValues("raised").Inc()
	}
}

// FenceCleared counts a fence that ended, by proof or by an operator.
func (m *Metrics) FenceCleared() {
	if m != nil {
		m.fences.WithLabelValues("cleared").Inc()
	}
}

// BytesIn counts accepted input bytes.
func (m *Metrics) BytesIn(n int64) {
	if m != nil && n > 0 {
		m.bytesIn.Add(float64(n))
	}
}

// BytesOut counts log bytes sent.
func (m *Metrics) BytesOut(n int64) {
	if m != nil && n > 0 {
		m.bytesOut.Add(float64(n))
	}
}

// Committed records one ledger commit that took d.
func (m *Metrics) Committed(err error, d time.Duration) {
	if m == nil {
		return
	}
	result := "ok"
	if err != nil {
		result = "error"
	}
	m.commits.WithLabelValues(result).Inc()
	m.commitTime.Observe(d.Seconds())
}

// Moved keeps the number of processes by state: one leaves from and enters to.
// An empty state is outside of what is counted, so Moved("", s) adds a process
// and Moved(s, "") takes it away.
func (m *Metrics) Moved(from, to api.ProcessState) {
	if m == nil || from == to {
		return
	}
	if from != "" {
		m.processes.WithLabelValues(string(from)).Dec()
	}
	if to != "" {
		m.processes.WithLabelValues(string(to)).Inc()
	}
}

// SetTargets replaces what is shown of targets. Targets are registered by the
// operator, so their names are a bounded set.
func (m *Metrics) SetTargets(targets []api.Target) {
	if m == nil {
		return
	}
	for _, v := range []*prometheus.GaugeVec{m.targetUp, m.targetBoxes, m.targetProcs, m.targetFence} {
		v.Reset()
	}
	for _, t := range targets {
		up := 0.0
		if t.Up {
			up = 1
		}
		m.targetUp.WithLabelValues(t.Name).Set(up)
		m.targetBoxes.WithLabelValues(t.Name).Set(float64(t.Boxes))
		m.targetProcs.WithLabelValues(t.Name).Set(float64(t.Processes))
		m.targetFence.WithLabelValues(t.Name).Set(float64(t.Fences))
	}
}

// SetBroker replaces what is shown of the broker.
func (m *Metrics) SetBroker(owners, unclassified, streams int) {
	if m == nil {
		return
	}
	m.owners.Set(float64(owners))
	m.unheard.Set(float64(unclassified))
	m.streams.Set(float64(streams))
}
