"""A reward that tells nearly all answers apart, so that every step learns something."""


def score(prompts, responses, rows):
    return [float(sum(map(int, filter(str.isdigit, response)))) for response in responses]
