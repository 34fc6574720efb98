package plugincontrol

import (
	"slices"
	"testing"
)

// TestWhatARunIsTold: processes are in the context of a run exactly when they are
// granted, whatever LangBot wrote, and nothing else changes.
func TestWhatARunIsTold(t *testing.T) {
	t.Parallel()
	const limits = `{"max_write_bytes":1048576,"max_read_bytes":1048576,"max_wait_ms":20000,"stdin_window_bytes":1048576}`
	for _, c := range []struct {
		granted  bool
		in, want string
	}{
		{false, `{"run_id":"r","x":NaN}`, `{"run_id":"r","x":NaN}`},
		{true, `{"run_id":"r"}`, `{"run_id":"r","context":{"available_apis":{"run_process":true}},"runtime":{"metadata":{"run_process":` + limits + `}}}`},
		{true, `{"context":null,"runtime":{"metadata":null}}`, `{"context":{"available_apis":{"run_process":true}},"runtime":{"metadata":{"run_process":` + limits + `}}}`},
		{true, `{"context":{"available_apis":{"box":true,"run_process":false}},"runtime":{"metadata":{"a":"\ud800"}}}`,
			`{"context":{"available_apis":{"box":true,"run_process":true}},"runtime":{"metadata":{"a":"\ud800","run_process":` + limits + `}}}`},
		{false, `{"context":{"available_apis":{"box":true,"run_process":true}},"runtime":{"metadata":{"run_process":1}}}`,
			`{"context":{"available_apis":{"box":true}},"runtime":{"metadata":{}}}`},
		{true, `{"context":5,"runtime":{"metadata":[]}}`, `{"context":5,"runtime":{"metadata":[]}}`},
	} {
		got, err := tellProcesses(object{[]byte(c.in)}, c.granted)
		if err != nil || string(got.raw) != c.want {
			t.Errorf("%v %s:\n%s\n%s, %v", c.granted, c.in, got.raw, c.want, err)
		}
	}
}

func TestConversation(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		in   string
		want []string
	}{
		{`{}`, nil}, {`{"conversation":null}`, nil}, {`{"conversation":{"bot_id":"b","thread_id":"t"}}`, nil}, {`{"conversation":{"conversation_id":5}}`, nil},
		{`{"conversation":{"conversation_id":"c","bot_id":"b","thread_id":"t"}}`, []string{"b", "c", "t"}},
		{`{"conversation":{"conversation_id":"c","bot_id":null}}`, []string{"", "c", ""}},
		{`{"context":{"conversation_id":"c","thread_id":"t"}}`, []string{"", "c", "t"}},
	} {
		if got := conversation(object{[]byte(c.in)}); !slices.Equal(got, c.want) {
			t.Errorf("%s: %q", c.in, got)
		}
	}
}
