// Package testmodel is a model server on loopback that follows a script: enough
// of the OpenAI Responses API, streamed as server-sent events, and of the Anthropic
// Messages API, streamed or not, for the real Codex CLI and the real Claude Code to
// work a task with it. It is for the demo and the tests; it holds no model.
//
// A script is a list of turns. Which turn is played follows from the request
// alone - how many tool results the conversation holds - so that a client that
// lost an answer and asks again gets the same one.
package testmodel
